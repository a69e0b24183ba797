"""The keys that all commands share: `handover` or `version`, `data`, `out`, and those of settings."""

from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import zoo
from certify.rows.images import Share
from certizoo import UserError
from certizoo.attacks import AttackConfig
from certizoo.attacks.kinds import fits, words
from certizoo.nearest import unknown
from certizoo.shards import DataConfig, config_of, from_elsewhere

Config = dict[str, Any]
S = TypeVar("S")


def handover_of(config: Config) -> Path:
    """Return the folder `handover`, that of the downloaded `version`, or that of the `model` with published weights."""
    given = [key for key in ("handover", "version", "model") if config.get(key)]
    if len(given) != 1:
        raise UserError(
            "set what to certify, exactly one of handover=DIR, version=NAME@ALIAS, or model=NAME of published weights"
        )
    if given == ["model"]:
        return zoo.weights.handover_of(str(config["model"]))
    if config["handover"]:
        return Path(config["handover"])
    from certizoo.registry import browse

    return browse.download(config["version"])


def out_of(config: Config, handover: Path, name: str) -> Path:
    """Return the folder `out`, or `name` beside the hand-over."""
    if config["out"]:
        return Path(config["out"])
    if config["version"] or config.get("model"):
        raise UserError("results of a published version need a folder; set out=DIR")
    return handover.parent / name


def data_of(config: Config, handover: Path) -> DataConfig:
    """Return `data`, or the training data if they are in a folder of this machine or `trust_data` is set."""
    if config.get("data"):
        return config_of(config["data"], "the command")
    said = zoo.handover.read_config(handover).get("data")
    return from_elsewhere(said, f"the config of {handover}", trusted=config["trust_data"] is True)


def share_of(config: Config) -> Share:
    """Return the keys `first` and `parts`."""
    first, parts = config["first"], config["parts"] or []
    if not fits(first, int) or not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
        raise UserError(f"first={first} parts={parts} must be a whole number, and a list of folders: parts=[DIR,DIR]")
    return Share(first, tuple(Path(part) for part in parts))


def attack_of(config: Config) -> AttackConfig:
    """Return the keys of `attack`."""
    names = [f"attack.{field.name}" for field in fields(AttackConfig)]
    for key in config["attack"]:
        if f"attack.{key}" not in names:
            raise unknown("config key", f"attack.{key}", names)
    return AttackConfig(**config["attack"])


def settings_of(kind: type[S], config: Config, **given: object) -> S:
    """Return settings of this class, from the keys with their names except those that are `given`."""
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    return kind(**{name: config[name] for name in names if name not in given}, **given)


def refuse_other_types(kind: type, config: Config, *names: str) -> None:
    """Raise UserError if a key with one of these names does not have the type of the setting."""
    types = get_type_hints(kind)
    for name in names:
        if not fits(config[name], types[name]):
            raise UserError(f"{name}={config[name]!r} has the wrong type; set {words(types[name])}")
