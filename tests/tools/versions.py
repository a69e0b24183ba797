"""Small publications like the stage's: weights, a whole certificate of them, and tags that agree."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from certizoo.registry.versions.publish import Published, publish

EPS = "0.1"
HEADLINE = f"certified_acc.{EPS}"


def certified(run_dir: Path, share: float = 0.4, images: int = 500, eps: str = EPS, **stated: Any) -> Path:
    """Write RUN_DIR/handover with its own weights, and a certificate of them.

    `stated` adds to the entries of the certificate or replaces them.
    """
    folder = run_dir / "handover"
    folder.mkdir(parents=True)
    seed = int.from_bytes(run_dir.name.encode()[-4:])
    save_file({"weight": np.random.default_rng(seed).normal(size=(3, 2))}, folder / "model.safetensors")
    certificate = {
        "weights_sha256": hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest(),
        "data_digest": "d" * 64,
        "image_list_sha256": "e" * 64,
        "images": images,
        "method": "lofast",
        "clean": 0.9,
        "dataset": "digits",
        "threat_model": {"norm": "l2"},
        "accuracy": {eps: {"certified": share, "pgd": 0.9}},
        "run": run_dir.name,
    }
    (folder / "certificate.json").write_text(json.dumps(certificate | stated))
    (folder / "config.yaml").write_text("model: {name: tiny}\n")
    (folder / "card.md").write_text("# Card\n")
    return folder


def norm_of(folder: Path) -> str:
    """Return the certificate's norm; L2 where it names none, is damaged or missing."""
    try:
        said = json.loads((folder / "certificate.json").read_text())
    except (ValueError, OSError):
        return "l2"
    return str((said["threat_model"] or {}).get("norm", "l2"))


def radius_of(folder: Path, eps: str) -> str:
    """Return the end of a share's tags: the eps, with its norm first where that is not L2."""
    return eps if norm_of(folder) == "l2" else f"{norm_of(folder)}.{eps}"


def tags_of(folder: Path, eps: str = EPS) -> dict[str, str]:
    """Return the tags that the stage would write, with the lower bound slightly below the share."""
    said = json.loads((folder / "certificate.json").read_text())
    share, radius = said["accuracy"][eps]["certified"], radius_of(folder, eps)
    return {
        "dataset": said["dataset"],
        "norm": norm_of(folder),
        "images": str(said["images"]),
        "clean_acc": f"{said['clean']:.4f}",
        "method": said["method"],
        f"certified_acc.{radius}": f"{share:.4f}",
        f"certified_low.{radius}": f"{max(0.0, share - 1 / said['images'] ** 0.5):.4f}",
        "weights_sha256": said["weights_sha256"],
        "data_digest": said["data_digest"],
        "image_list_sha256": said["image_list_sha256"],
    }


def issue(folder: Path, uri: str | None, eps: str = EPS, **changes: Any) -> Published:
    """Publish the folder as a version of the model `tiny`.

    `tags` among the changes add to those of the certificate; `all_tags` replace them.
    """
    tags = changes.pop("all_tags", None) or tags_of(folder, eps) | changes.pop("tags", {})
    given = {
        "name": "tiny",
        "tags": tags,
        "description": "# Card\nall of it",
        "metrics": {},
        "experiment": "digits",
        "headline": f"certified_acc.{radius_of(folder, eps)}",
        "uri": uri,
    }
    return publish(folder, **(given | changes))
