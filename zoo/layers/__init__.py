"""The layers other than attention, each with its rules."""
