"""Nets and instances of the Verification of Neural Networks Competition, read from its files into our models."""
