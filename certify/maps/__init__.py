"""Linear maps of a whole network, measured around a clean batch."""
