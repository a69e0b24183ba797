"""What is claimed about speed, each claim with its command, hardware and results."""
