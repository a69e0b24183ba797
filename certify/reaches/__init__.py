"""Reaches and ellipsoids with the second order of hidden units and of attention, of which only the rest is bounded."""
