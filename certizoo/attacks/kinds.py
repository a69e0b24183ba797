"""Attacks from the options of a protocol file: {"kind": "pgd", "norm": "l2", "eps": 0.5} -> AttackConfig."""

from collections.abc import Mapping
from dataclasses import MISSING, fields
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from certizoo import UserError
from certizoo.attacks.attack import Attack
from certizoo.attacks.auto import AutoAttack
from certizoo.attacks.corruption import Corruption
from certizoo.attacks.loop import AttackConfig
from certizoo.attacks.minimal import CarliniWagner, DeepFool
from certizoo.nearest import choices, unknown

KINDS: dict[str, type] = {
    "pgd": AttackConfig,
    "autoattack": AutoAttack,
    "cw_l2": CarliniWagner,
    "deepfool": DeepFool,
    "corruption": Corruption,
}
"""The attack class of each `kind`; its options are the fields of the class."""


def make(options: Mapping[str, object]) -> Attack:
    """Return the attack of `options["kind"]` with the other options. Raises UserError naming the key and its values."""
    given = dict(options)
    kind = given.pop("kind", None)
    if not isinstance(kind, str) or kind not in KINDS:
        raise unknown("attack kind", str(kind), KINDS)
    cls, types = KINDS[kind], get_type_hints(KINDS[kind])
    names = {field.name: field for field in fields(cls)}
    for key, value in given.items():
        if key not in names:
            raise UserError(f"{kind} has no option {key!r}; {choices(key, names)}")
        if not fits(value, types[key]):
            raise UserError(f"{kind}: {key}={value!r} does not work; give {words(types[key])}")
    for name, field in names.items():
        if name not in given and field.default is MISSING and field.default_factory is MISSING:
            raise UserError(f"{kind} needs {name}: {words(types[name])}")
    return cls(**{key: tuple(value) if isinstance(value, list) else value for key, value in given.items()})


def fits(value: object, wanted: Any) -> bool:
    """Return True if a value read from YAML has the type; whole numbers are numbers, True is not."""
    if isinstance(wanted, UnionType):
        return any(fits(value, choice) for choice in get_args(wanted))
    if get_origin(wanted) is tuple:
        return isinstance(value, (list, tuple)) and all(fits(item, get_args(wanted)[0]) for item in value)
    if isinstance(value, bool) or wanted is bool:
        return isinstance(value, bool) and wanted is bool
    return isinstance(value, (int, float)) if wanted is float else isinstance(value, wanted)


def words(wanted: Any) -> str:
    """Describe a type in words."""
    names = {float: "a number", int: "a whole number", bool: "true or false", str: "a name", type(None): "null"}
    if isinstance(wanted, UnionType):
        return " or ".join(words(choice) for choice in get_args(wanted))
    return (
        f"a list of {words(get_args(wanted)[0]).removeprefix('a ')}s" if get_origin(wanted) is tuple else names[wanted]
    )
