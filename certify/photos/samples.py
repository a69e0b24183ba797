"""Sample images in the package, drawings of classes that some model knows: `python -m certify image ship`."""

from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).with_name("samples")


def sample_of(name: str) -> Path | None:
    """Return the file of a sample by its name, such as 'ship'; None for a name that no sample has."""
    return next((path for path in samples() if path.stem == name), None)


def samples(classes: Sequence[str] | None = None) -> list[Path]:
    """Return all samples, or those of the named classes."""
    return [path for path in sorted(FOLDER.glob("*.png")) if classes is None or path.stem in classes]
