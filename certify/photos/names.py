"""The names of the labels of known data sets."""

from collections.abc import Sequence

KNOWN: dict[str, tuple[str, ...]] = {
    "cifar10": ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    "digits": tuple("0123456789"),
    "imagenette": (
        "tench",
        "English springer",
        "cassette player",
        "chain saw",
        "church",
        "French horn",
        "garbage truck",
        "gas pump",
        "golf ball",
        "parachute",
    ),
    "mnist": tuple("0123456789"),
}


def names_of(dataset: str, classes: int) -> Sequence[str]:
    """Return the names of the classes, 'class 7' where they are unknown."""
    known = KNOWN.get(dataset, ())
    return known if len(known) == classes else [f"class {label}" for label in range(classes)]
