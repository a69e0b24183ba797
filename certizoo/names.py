"""Models that compose without a recipe file, from configs/names.yaml and the files of configs/attention/."""

from functools import cache
from pathlib import Path
from typing import Any

import yaml

NAMES = "names.yaml"


@cache
def unwritten(configs: Path) -> dict[str, dict[str, Any]]:
    """Return {name: the content of a configs/model/NAME.yaml}.

    The zoo refuses some of them: an attention of another form than softmax(score) V works in the ViT only, which only
    its code states.
    """
    said = yaml.safe_load((configs / NAMES).read_text())
    backbones: dict[str, list[str]] = said["backbones"]
    prefixes = {path.stem: {} for path in sorted((configs / "attention").glob("*.yaml"))} | said["prefixes"]
    found: dict[str, dict[str, Any]] = {}
    for prefix, own in prefixes.items():
        for ending in [*_endings(backbones, own.get("backbones", backbones)), *own.get("more", ())]:
            name = f"{prefix}_{ending}"
            found[name] = {"defaults": own.get("defaults", []), "model": {"name": name}}
    return found


def _endings(backbones: dict[str, list[str]], chosen: Any) -> list[str]:
    return [f"{backbone}_{size}" for backbone in chosen for size in backbones[backbone]]
