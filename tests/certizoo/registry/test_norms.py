"""Tags of shares name their norm: they are read back, sorted, compared and refused by it; L2 has no prefix."""

import sys
from pathlib import Path
from typing import Any

import pytest

from certizoo import UserError
from certizoo.registry import browse
from certizoo.registry.__main__ import main
from certizoo.registry.select import select
from certizoo.registry.versions import version_tags
from tests.tools import versions

EPS = "0.0156863"  # 4/255
LINF: dict[str, Any] = {"threat_model": {"norm": "linf"}}


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("certified_acc.0.1", ("certified_acc", "l2", "0.1")),
        ("certified_acc.l2.0.1", ("certified_acc", "l2", "0.1")),
        ("pgd_acc.linf.0.0156863", ("pgd_acc", "linf", "0.0156863")),
        ("certified_low.1", ("certified_low", "l2", "1")),
        ("certified_acc.linf", ("certified_acc", "linf", "")),
        ("clean_acc", ("clean_acc", "l2", "")),
    ],
)
def test_the_name_of_a_share_is_taken_apart(name: str, parts: tuple[str, str, str]) -> None:
    assert version_tags.parts(name) == parts
    if parts[2] and "l2" not in name:
        assert version_tags.share(*parts) == name


@pytest.fixture
def uri(store_in: str, tmp_path: Path) -> str:
    """Make tiny/1 and tiny/2 in L2, tiny/3 and tiny/4 in Linf, with shares 0.2, 0.6, 0.3, 0.9 at the same number."""
    for number, (share, stated) in enumerate([(0.2, {}), (0.6, {}), (0.3, LINF), (0.9, LINF)]):
        versions.issue(versions.certified(tmp_path / f"run{number}", share, eps=EPS, **stated), store_in, EPS)
    return store_in


def test_versions_are_sorted_and_chosen_by_shares_of_one_norm(uri: str) -> None:
    found = browse.versions(uri=uri)

    def order(*where: str, sort: str | None = None) -> list[str]:
        return [v.version for v in select(found, where, sort)]

    assert order(sort="certified_acc.linf.0.0157") == ["4", "3", "2", "1"]
    assert order(sort="certified_acc.0.0157") == order(sort="certified_acc.l2.0.0157") == ["2", "1", "4", "3"]
    assert order("certified_acc.linf.0.0157>=0.5") == ["4"]
    assert order("norm=linf") == ["4", "3"]


def test_the_list_has_a_column_a_norm(
    uri: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["registry", "list", "--uri", uri])
    main()
    head = next(line for line in capsys.readouterr().out.splitlines() if "name" in line)
    assert f"certified_acc.{EPS}" in head
    assert f"certified_acc.linf.{EPS}" in head
    assert head.index(f"certified_acc.{EPS}") < head.index(f"certified_acc.linf.{EPS}")


def test_a_champion_of_one_norm_is_not_beaten_by_the_other(uri: str) -> None:
    holders = {alias: v.version for v in browse.versions(uri=uri) for alias in v.aliases}
    assert holders == {"champion": "2", "champion-digits": "2"}


@pytest.mark.hostile
@pytest.mark.parametrize(
    ("stated", "tags", "words"),
    [
        (LINF, {"certified_acc.0.0156863": "0.4000", "norm": "linf"}, "is for norm l2, but certificate.json for linf"),
        ({}, {"certified_acc.linf.0.0156863": "0.4000"}, "is for norm linf, but certificate.json for l2"),
        ({}, {"pgd_acc.linf.0.0156863": "0.9000"}, "is for norm linf, but certificate.json for l2"),
        ({}, {"certified_low.linf.0.0156863": "0.1000"}, "is for norm linf, but certificate.json for l2"),
        (LINF, {"certified_acc.linf.0.0156863": "0.9900"}, "is 0.9900, but certificate.json says 0.4"),
        (LINF, {"norm": "l2"}, "norm is l2, but certificate.json says linf"),
        ({"threat_model": {}}, {"norm": "linf"}, "norm is linf, but certificate.json says None"),
        ({"threat_model": {"norm": ["l2"]}}, {}, "is not published"),
    ],
)
def test_a_share_of_another_norm_than_the_certificates_is_not_published(
    stated: dict[str, Any], tags: dict[str, str], words: str, store_in: str, tmp_path: Path
) -> None:
    folder = versions.certified(tmp_path / "run", 0.4, eps=EPS, **stated)
    with pytest.raises(UserError, match=words.replace(".", r"\.")):
        versions.issue(folder, store_in, EPS, tags=tags)
