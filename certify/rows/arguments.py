"""The keys that all commands share: `handover` or `version`, `data`, `out`, and those of settings."""

import atexit
import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import zoo
from certify.rows.images import Share
from certizoo import UserError
from certizoo.config.schema import PathText, Section, hints, section_of
from certizoo.shards import DataConfig, config_of, from_elsewhere, require_fit
from certizoo.shards.format.config import TEXT
from zoo.user_models import is_function

Config = dict[str, Any]
S = TypeVar("S", bound=Section)


@dataclass(frozen=True)
class Subject(Section):
    """The keys that say what a command is about and where its results go."""

    handover: PathText | None = None
    version: str | None = None
    model: str | None = None
    data: dict[str, Any] | None = None
    trust_data: bool = False
    out: PathText | None = None


def handover_of(config: Config) -> Path:
    """Return the folder `handover`, that of the downloaded `version`, or that of the `model`.

    `handover` may also name the run of the folder, runs/NAME. A `model` is a name with published weights, or the user's
    MODULE:FUNCTION, whose folder is removed at the end of the process.
    """
    given = [key for key in ("handover", "version", "model") if config.get(key)]
    if len(given) != 1:
        raise UserError(
            "set what to certify, exactly one of handover=DIR, version=NAME@ALIAS, or model= with a name of published "
            "weights or your own MODULE:FUNCTION"
        )
    if given == ["model"]:
        name = str(config["model"])
        return _of_function(name, config) if is_function(name) else zoo.weights.handover_of(name)
    if config["handover"]:
        return zoo.handover.folder_of(Path(config["handover"]))
    from certizoo.registry import browse

    return browse.download(config["version"])


def _of_function(name: str, config: Config) -> Path:
    """Return the folder of the model that MODULE:FUNCTION makes; `data` says which images it takes."""
    if not _has_data(config):
        raise UserError(f"model={name} does not say which images it takes; add data=NAME data.root=FOLDER")
    data = config_of(config["data"], "the command")
    folder = Path(tempfile.mkdtemp(prefix="certizoo-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    shape_CHW = data.channels, data.img_size, data.img_size
    zoo.handover.save_function(folder, name, shape_CHW, {"data": {"name": data.name}})
    return folder


def out_of(config: Config, handover: Path, name: str) -> Path:
    """Return the folder `out`, or `name` beside the hand-over."""
    if config["out"]:
        return Path(config["out"])
    if config["version"] or config.get("model"):
        raise UserError("results need a folder; set out=DIR")
    return handover.parent / name


def data_of(config: Config, handover: Path) -> DataConfig:
    """Return `data`, or the training data: in `data.root`, or as the hand-over says, if that is allowed.

    It is if they are in a folder of this machine or `trust_data` is set. Raises UserError if they are not images and
    labels that the model takes.
    """
    said, where = zoo.handover.read_config(handover), f"the config of {handover}"
    root, own = (config.get("data") or {}).get("root"), said.get("data")
    if _has_data(config):
        data = config_of(config["data"], "the command")
    elif root and isinstance(own, dict):
        data = replace(config_of({**own, "root": root}, where), mix=None, cache=None)
    else:
        data = from_elsewhere(own, where, trusted=config["trust_data"])
    require_fit(data, said["model"])
    return replace(data, tokenizer=str(handover / zoo.handover.TOKENIZER)) if data.kind == TEXT else data


def _has_data(config: Config) -> bool:
    """Return whether the command names its data, and not only their folder."""
    return bool(set(config.get("data") or {}) - {"root"})


def share_of(config: Config) -> Share:
    """Return the keys `first` and `parts`."""
    return settings_of(Share, config)


def settings_of(kind: type[S], config: Config, **given: object) -> S:
    """Return settings of this class: `given`, and the keys of the same names for all others."""
    if missing := [name for name in hints(kind) if name not in given and name not in config]:
        raise UserError(f"the key {missing[0]} is missing; give {missing[0]}=VALUE instead of deleting it")
    return section_of(kind, {name: config[name] for name in hints(kind) if name not in given} | given)
