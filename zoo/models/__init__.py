"""Whole models: their classes, the catalogue of names, weights from elsewhere, an overview."""
