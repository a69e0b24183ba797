"""Figures and bounds as the papers state them, for comparison: nothing here enters a certificate."""
