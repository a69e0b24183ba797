"""Configurations: composed by Hydra, typed by sections, described by their comments."""
