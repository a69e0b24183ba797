"""The Taylor certificate: the second order of hidden units exactly, and bounds of what is beyond."""
