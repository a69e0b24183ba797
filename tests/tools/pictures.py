"""Small picture files."""

from pathlib import Path

from PIL import Image


def picture(path: Path, value: int = 0) -> Path:
    """Write a picture of one colour, with its folders, and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8), (value, 0, 0)).save(path)
    return path
