"""Every protocol of configs/protocol names existing attacks, has a lab note, and uses the radii of its paper."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from certify.stage.settings import EPS
from certizoo.attacks import AttackConfig, make
from certizoo.attacks.auto import STANDARD, AutoAttack
from certizoo.attacks.minimal import CarliniWagner
from tests.tools.config_files import files, note

FILES = files("protocol")
EXPECTED = {
    "quick", "specformer_std", "specformer_at", "covit", "lofast", "certvit", "robustbench", "robustbench_imagenet",
    "nested", "quick_linf", "nested_linf",
}  # fmt: skip


def attacks_of(path: Path) -> Mapping[str, Any]:
    content = yaml.safe_load(path.read_text())
    assert list(content) == ["name", "attacks"]
    assert content["name"] == path.stem
    return {name: make(options) for name, options in content["attacks"].items()}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_protocol_is_attacks_in_pixels(path: Path) -> None:
    assert "[0,1] pixel" in " ".join(note(path).replace("#", " ").split()), "units"
    attacks = attacks_of(path)
    assert attacks
    assert all(name.replace("_", "").isalnum() for name in attacks), "names become columns and keys of Hydra"
    for attack in attacks.values():
        assert attack.norm in ("linf", "l2", "none")
        assert attack.eps is None or attack.eps > 0
        assert isinstance(attack.together, bool)


def test_the_papers_numbers() -> None:
    found = {path.stem: attacks_of(path) for path in FILES}
    assert set(found) == EXPECTED
    assert found["specformer_std"] == {
        "fgsm": AttackConfig("linf", 2 / 255, 1, 2 / 255, random_start=False, stop_when_fooled=True),
        "pgd_2": AttackConfig("linf", 2 / 255, 2, 2 / 255, stop_when_fooled=True),
    }
    assert found["specformer_at"] == {
        "cw_20": AttackConfig("linf", 8 / 255, 20, 2 / 255, loss="margin", stop_when_fooled=True),
        "pgd_20": AttackConfig("linf", 8 / 255, 20, 2 / 255, stop_when_fooled=True),
        "pgd_100": AttackConfig("linf", 8 / 255, 100, 2 / 255, stop_when_fooled=True),
    }
    assert found["covit"] == {
        "fgsm": AttackConfig("linf", 2 / 255, 1, 2 / 255, random_start=False, stop_when_fooled=True),
        "pgd_7_linf": AttackConfig("linf", 2 / 255, 7, 2 / 255, stop_when_fooled=True),
        "pgd_7_l2": AttackConfig("l2", 2.0, 7, 0.2, stop_when_fooled=True),
        "pgd_20_l2": AttackConfig("l2", 2.0, 20, 0.2, stop_when_fooled=True),
        "cw_l2": CarliniWagner(c=1, confidence=0, lr=0.01, steps=100, binary_search_steps=1, threshold=260),
    }
    certified = EPS["l2"]
    for name, eps in (("quick", certified), ("lofast", [0.02, 0.05, 0.1, 36 / 255]), ("certvit", [1.58, 36 / 255])):
        wanted = [AttackConfig("l2", radius, 40, loss="margin", stop_when_fooled=True) for radius in eps]
        assert list(found[name].values()) == wanted
    wanted = [AttackConfig("linf", radius, 40, loss="margin", stop_when_fooled=True) for radius in EPS["linf"]]
    assert list(found["quick_linf"].values()) == wanted
    assert found["nested_linf"] == {
        "pgd100": AttackConfig("linf", 2 / 255, 100, loss="margin", stop_when_fooled=True),
        "autoattack": AutoAttack("linf", 2 / 255, STANDARD),
    }
    assert found["nested"] == {
        "pgd100": AttackConfig("l2", 36 / 255, 100, loss="margin", stop_when_fooled=True),
        "autoattack": AutoAttack("l2", 36 / 255, STANDARD),
    }
    assert list(found["robustbench"].values()) == [AutoAttack("linf", 8 / 255, STANDARD), AutoAttack("l2", 0.5)]
    assert list(found["robustbench_imagenet"].values()) == [AutoAttack("linf", 4 / 255, STANDARD)]
