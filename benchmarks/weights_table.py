"""The table of published weights, zoo/weights/table.yaml, from the hand-overs beside it and benchmarks/results."""

import json
from pathlib import Path
from typing import Any

from benchmarks.record import RESULTS
from certizoo.documents import read_yaml
from certizoo.files import sha256
from zoo.weights.table import CONFIG, HERE, PACKAGE, TABLE, WEIGHTS, entries

__all__ = ["TABLE", "entries", "text"]


def text() -> str:
    """Return the file: its comment, then an entry for each hand-over in the package."""
    lines = TABLE.read_text().splitlines(keepends=True)
    comment = "".join(line for line in lines if line.startswith("#"))
    return comment + "".join(_entry(path.parent) for path in sorted(HERE.glob(f"*/{WEIGHTS}")))


def _entry(folder: Path) -> str:
    dataset = read_yaml(folder / CONFIG)["data"]["name"]
    claims = [json.loads(path.read_text()) for path in sorted(RESULTS.glob(f"{folder.name}_{dataset}_best*.json"))]
    first = claims[0]
    said = {
        "source": PACKAGE,
        "sha256": sha256(folder / WEIGHTS),
        "bytes": (folder / WEIGHTS).stat().st_size,
        "config_sha256": sha256(folder / CONFIG),
        "dataset": dataset,
        "images": first["images"],
        "clean": _percent(first["clean"]),
    }
    curves = "".join(f"    {claim['norm']}: {_curve(claim)}\n" for claim in claims)
    return (
        f"{folder.name}:\n" + "".join(f"  {key}: {value}\n" for key, value in said.items()) + f"  certified:\n{curves}"
    )


def _curve(claim: dict[str, Any]) -> str:
    shares = [f"{eps}: {_percent(at['certified'])}" for eps, at in claim["accuracy"].items()]
    return f"{{{', '.join(shares)}}}"


def _percent(share: float) -> float:
    return round(100 * share, 2)
