"""What may be added to any objective: masks of the attack, mixed labels, SAM."""
