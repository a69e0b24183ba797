"""Linear bounds of every tensor of a captured graph, backwards to the image (CROWN), with their rounding."""
