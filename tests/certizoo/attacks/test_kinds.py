"""Attacks are built from options; an unknown or unsuitable option is refused in one line that names the key."""

import pytest

from certizoo import UserError
from certizoo.attacks import KINDS, AttackConfig, make


def test_options_are_the_fields() -> None:
    options = {"kind": "pgd", "norm": "l2", "eps": 1, "steps": 3, "step_size": None, "stop_when_fooled": True}
    assert make(options) == AttackConfig("l2", 1, 3, stop_when_fooled=True)
    assert options["kind"] == "pgd", "the caller's mapping is left alone"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "no attack kind 'None'; nearest: "),
        ({"kind": "PGD"}, "no attack kind 'PGD'; nearest: pgd, "),
        ({"kind": ["pgd"]}, "no attack kind"),
        ({"kind": "pgd", "stepsize": 1.0}, "no config key 'pgd.stepsize'; nearest: pgd.step_size"),
        ({"kind": "pgd", "eps": "8/255"}, "pgd.eps='8/255' is invalid; give a number of at least 0"),
        ({"kind": "pgd", "eps": True}, "give a number"),
        ({"kind": "pgd", "steps": 2.5}, "give a whole number"),
        ({"kind": "pgd", "random_start": 2}, "give true or false"),
        ({"kind": "pgd", "step_size": "big"}, "give a number above 0, or null"),
        ({"kind": "pgd", "norm": "l3"}, "pgd.norm='l3' is invalid; give one of linf, l2"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_in_one_line(options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError) as refusal:
        make(options)
    assert message in str(refusal.value)


def test_every_kind_names_its_options() -> None:
    for kind in KINDS:
        with pytest.raises(UserError, match=f"no config key '{kind}.colour'"):
            make({"kind": kind, "colour": "red"})
