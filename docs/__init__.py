"""Sources of the documentation site; the code here runs when the site is built and in its tests."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]  # of the repository
