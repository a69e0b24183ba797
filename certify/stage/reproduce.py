"""The command that reproduces a certificate, as its report shows it."""

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

from certify.stage.settings import Settings
from certizoo.config.compose import override
from certizoo.registry.server import credentials
from certizoo.shards import DataConfig
from certizoo.shards.format.config import is_remote
from zoo.user_models import is_function

KEYS = ("method", "norm", "served_dtype", "images", "batch_size", "search_radii")


def command(handover: Path, config: dict[str, Any], data: DataConfig, settings: Settings, first: int = 0) -> str:
    """Return `python -m certify ...` with every setting.

    The data are included unless the hand-over's own config names the same local data.
    """
    name = config["model"]["name"]
    arguments: dict[str, object] = {"model": name, "out": "OUT"} if is_function(name) else {"handover": str(handover)}
    own, given, moved = config.get("data"), asdict(data), {"root": None, "cache": None}
    if own != given or is_remote(data.root):
        arguments |= {} if isinstance(own, dict) and own | moved == given | moved else {"data": data.name}
        arguments |= {"data.root": data.root}
    keys = [*KEYS, "nonce" if settings.beacon is None else "beacon"]
    arguments |= {key: getattr(settings, key) for key in keys}
    arguments |= {"first": first} if first else {}
    arguments |= {"eps": settings.grid, "headline_eps": settings.headline}
    arguments |= {f"attack.{key}": value for key, value in asdict(settings.attack_in_norm).items()}
    shown = credentials.redacted(arguments)
    return shlex.join(["python", "-m", "certify", *(override(key, value) for key, value in shown.items())])
