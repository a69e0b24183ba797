"""The teacher of a distillation by name: a hand-over folder, a version of the registry, or published weights."""

import hashlib
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zoo
from certizoo import UserError
from certizoo.files import sha256
from certizoo.nearest import choices
from certizoo.registry import browse
from certizoo.shards import DataConfig, require_fit
from zoo.weights import table

VERSION = re.compile(r"(models:/)?[^@/]+(@[^@/]+|/[0-9]+)")  # of the registry, not of a path


@dataclass(frozen=True)
class Teacher:
    """A hand-over, `digest` of its weights and its config, by which a resumed run knows it again."""

    named: str
    folder: Path
    config: dict[str, Any]
    digest: str

    @cached_property
    def bytes(self) -> int:
        return (self.folder / table.WEIGHTS).stat().st_size

    def require_fit(self, data: DataConfig) -> None:
        """Raise UserError unless the teacher takes the images and knows the classes. It normalises pixels itself."""
        try:
            require_fit(data, {"name": self.config["model"]["name"], **zoo.model_options(**self.config["model"])})
        except UserError as error:
            raise UserError(f"distill.teacher={self.named}: {error} Or choose another teacher.") from None

    def load(self) -> nn.Module:
        """Return the frozen model in eval mode; torch's random stream is left as it is."""
        with torch.random.fork_rng([]):  # its first weights are drawn
            model, _ = zoo.handover.load(self.folder)
        return model


def find_teacher(named: str | None, uri: str | None) -> Teacher | None:
    """Return the teacher; None without a name. Raises UserError if there is none of that name.

    Args:
        named: a hand-over folder or that of its run, NAME@ALIAS or NAME/VERSION, or a name with published weights.
        uri: the registry's.
    """
    if named is None:
        return None
    try:
        folder = _folder(named, uri)
        config = zoo.handover.read_config(folder)
    except UserError as error:
        raise UserError(f"distill.teacher={named}: {error}") from None
    both = sha256(folder / table.WEIGHTS) + sha256(folder / table.CONFIG)
    return Teacher(named, folder, config, hashlib.sha256(both.encode()).hexdigest())


def _folder(named: str, uri: str | None) -> Path:
    if Path(named).is_dir():
        return zoo.handover.folder_of(Path(named))
    if named in table.entries():
        return table.handover_of(named)
    if VERSION.fullmatch(named):
        return browse.download(named, uri)
    raise UserError(
        "there is no such folder and no such published model; give a hand-over folder, NAME@ALIAS of the registry, or "
        f"a name with weights ({choices(named, table.entries())})"
    )
