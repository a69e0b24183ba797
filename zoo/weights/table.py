"""The entries of table.yaml, and the folder with a model's hand-over, whose digests are compared on every access."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from certizoo import UserError
from certizoo.documents import read_yaml
from certizoo.files import sha256
from certizoo.norms import L2, NAMES
from zoo.weights import fetch

WEIGHTS, CONFIG = "model.safetensors", "config.yaml"  # of every hand-over
HERE = Path(__file__).parent
TABLE = HERE / "table.yaml"
PACKAGE = "package"
MIRROR = "CERTIZOO_WEIGHTS"  # environment: a folder, URL or hf-hub: with a folder per model, which replaces `source`


@dataclass(frozen=True)
class Entry:
    """One model of the table; its shares are in per cent, `certified` by norm and eps."""

    name: str
    source: str
    sha256: str
    bytes: int
    config_sha256: str
    dataset: str
    images: int
    clean: float
    certified: Mapping[str, Mapping[float, float]]

    def words(self, norms: Mapping[str, str] = NAMES) -> str:
        """Return 'cifar10 (1000 images): clean 61.0 %; certified L2 0.1: 54.5 %, ...' for these norms."""
        shares = [
            f"{norms[norm]} {eps:.4g}: {share:.1f} %"
            for norm, curve in self.certified.items()
            if norm in norms
            for eps, share in curve.items()
        ]
        return f"{self.dataset} ({self.images} images): clean {self.clean:.1f} %; certified {', '.join(shares)}"

    @property
    def headline(self) -> str:
        """The text '54.5 at 0.1': the L2 share at 0.1, or at the eps nearest to it."""
        curve = self.certified.get(L2) or next(iter(self.certified.values()))
        eps = min(curve, key=lambda eps: abs(eps - 0.1))
        return f"{curve[eps]:.1f} at {eps:.4g}"


@cache
def entries(table: Path = TABLE) -> dict[str, Entry]:
    """Return the table."""
    return {name: Entry(name, **said) for name, said in read_yaml(table).items()}


def entry(name: str) -> Entry:
    """Return the entry of a model that has weights. Raises UserError for another."""
    known = entries()
    if name not in known:
        raise UserError(
            f"{name} has no published weights; models with weights: {', '.join(known)}. Your own checkpoints are in "
            "the registry (certizoo registry list)"
        )
    return known[name]


def handover_of(name: str) -> Path:
    """Return the folder of its hand-over: in the package, or in the cache, fetched if it is missing.

    Every file is compared with its digest each time. Raises UserError if the files are not available.
    """
    said = entry(name)
    files = {WEIGHTS: (said.sha256, said.bytes), CONFIG: (said.config_sha256, fetch.SMALL)}
    if said.source == PACKAGE:
        return _whole(HERE / name, files)
    folder = fetch.cache_folder() / f"{name}-{said.sha256[:16]}"
    base = os.environ.get(MIRROR)
    source = f"{base.rstrip('/')}/{name}" if base else said.source
    advice = f"connect to the network, or set {MIRROR} to a folder or URL that contains {name}/{WEIGHTS}"
    for file, (digest, most) in files.items():
        fetch.fetched(fetch.within(source, file), digest, folder / file, most, advice)
    return folder


def _whole(folder: Path, files: Mapping[str, tuple[str, int]]) -> Path:
    for file, (digest, _) in files.items():
        if not (folder / file).is_file() or sha256(folder / file) != digest:
            raise UserError(f"{folder / file} does not have the digest in the table; install certizoo again")
    return folder
