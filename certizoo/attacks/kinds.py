"""Attacks from the options of a protocol file: {"kind": "pgd", "norm": "l2", "eps": 0.5} -> AttackConfig."""

from collections.abc import Mapping
from typing import Any

from certizoo import plugins
from certizoo.attacks.attack import Attack
from certizoo.attacks.auto import AutoAttack
from certizoo.attacks.corruption import Corruption
from certizoo.attacks.loop import AttackConfig
from certizoo.attacks.minimal import CarliniWagner, DeepFool
from certizoo.config.schema import section_of
from certizoo.nearest import unknown

KINDS: dict[str, Any] = {
    "pgd": AttackConfig,
    "autoattack": AutoAttack,
    "cw_l2": CarliniWagner,
    "deepfool": DeepFool,
    "corruption": Corruption,
}
"""The attack class of each `kind`; its options are the fields of the class. Other packages add theirs."""


def make(options: Mapping[str, object]) -> Attack:
    """Return the attack of `options["kind"]` with the other options. Raises UserError naming the key and its values."""
    plugins.load()
    given = dict(options)
    kind = given.pop("kind", None)
    if not isinstance(kind, str) or kind not in KINDS:
        raise unknown("attack kind", str(kind), KINDS)
    made: Attack = section_of(KINDS[kind], given, kind)
    return made
