"""Other packages extend names and configurations; a broken one is named in one line. The wheel: test_wheel_slow.py."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import zoo
from certizoo import UserError, attacks, plugins
from certizoo.config.compose import compose_config
from tuning import spaces

MODULE = """
from certizoo.attacks import KINDS, AttackConfig
from zoo.attention import VARIANTS
from zoo.attention.dot_product import DotProductAttention
VARIANTS["own"], KINDS["own"] = type("Own", (DotProductAttention,), {}), AttackConfig
"""


def forget() -> None:
    plugins.load.cache_clear()
    plugins.config_folders.cache_clear()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a folder of installed packages with one extension."""
    info = tmp_path / "own_zoo-1.0.dist-info"
    for name, text in (
        ("own_zoo/__init__.py", MODULE),
        ("own_zoo/configs/space/own.yaml", "parameters: {optimizer.lr: {uniform: [0.1, 0.2]}}\n"),
        ("own_zoo/configs/optimizer/own.yaml", "name: sgd\nlr: 0.125\n"),
        ("own_zoo/configs/optimizer/sgd.yaml", "name: sgd\nlr: 7\n"),
        (f"{info.name}/METADATA", "Metadata-Version: 2.1\nName: own-zoo\nVersion: 1.0\n"),
        (f"{info.name}/entry_points.txt", "[certizoo.plugins]\nown = own_zoo\n"),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(zoo.attention, "VARIANTS", {})
    monkeypatch.setattr(attacks, "KINDS", dict(attacks.KINDS))
    forget()
    yield tmp_path
    forget()
    sys.modules.pop("own_zoo", None)


def test_configurations_are_found_without_an_import_and_ours_come_first(site: Path) -> None:
    words = ["+model=dp_vit_ti", "data=digits"]
    assert compose_config("adv_train", [*words, "optimizer=own"])["optimizer"]["lr"] == 0.125
    assert compose_config("adv_train", [*words, "optimizer=sgd"])["optimizer"]["lr"] != 7
    more = site / "more"
    (more / "optimizer").mkdir(parents=True)
    (more / "optimizer" / "third.yaml").write_text("name: sgd\nlr: 0.5\n")
    searched = [*words, "optimizer=third", f"hydra.searchpath=[file://{more}]"]
    assert compose_config("adv_train", searched)["optimizer"]["lr"] == 0.5
    assert "own" in spaces.names()
    assert spaces.load("own").parameters["optimizer.lr"].high == 0.2
    assert "own_zoo" not in sys.modules


def test_names_are_found_where_they_are_looked_up(site: Path) -> None:
    assert zoo.attention.variants()["own"].__name__ == "Own"
    assert "own_zoo" in sys.modules


@pytest.mark.parametrize("text", ["import nothing_of_the_kind\n", "raise RuntimeError('no luck')\n", "def\n"])
def test_a_broken_package_is_named(site: Path, text: str) -> None:
    (site / "own_zoo" / "__init__.py").write_text(text)
    with pytest.raises(UserError, match=r"the extension own-zoo cannot be imported .*pip uninstall own-zoo"):
        attacks.make({"kind": "pgd", "norm": "l2", "eps": 0.1})
