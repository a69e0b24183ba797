"""How far images move leaves: what the remainders of units and of attention, kept to second order, add to reaches."""
