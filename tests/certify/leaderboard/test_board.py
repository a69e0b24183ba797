"""A right leaderboard entry can be recomputed from its certificate; a wrong one is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from certify.__main__ import main
from certify.leaderboard.entry import PROVED
from certify.leaderboard.of_results import entry_of, summary_of
from certify.leaderboard.recheck import likely
from certify.leaderboard.rows import forged, rows_of
from certify.rows.intervals import at_most
from certizoo import UserError
from tests.tools.leaderboard_files import SCHEMA

IMAGES = 12


@pytest.fixture(scope="module")
def results(handover: Path, digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the finished certificate of the small model."""
    out = tmp_path_factory.mktemp("results")
    words = [f"handover={handover}", f"out={out}", f"images={IMAGES}", "method=adjoint", "eps=[0.05,0.3]"]
    main([*words, "headline_eps=0.05", "attack.steps=5", "data=digits", f"data.root={digits}"])
    return out


@pytest.fixture(scope="module")
def made(handover: Path, results: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the leaderboard entry of the certificate."""
    out = tmp_path_factory.mktemp("entry") / "digits.json"
    main(["submit", f"handover={handover}", f"results={results}", f"out={out}", "training=8 epochs on one core"])
    return out


@pytest.fixture
def changed(made: Path, tmp_path: Path) -> Callable[..., Path]:
    def change(alter: Callable[[dict[str, Any]], object]) -> Path:
        entry = json.loads(made.read_text())
        alter(entry)
        (tmp_path / "changed.json").write_text(json.dumps(entry))
        return tmp_path / "changed.json"

    return change


def check(path: Path, handover: Path, digits: Path, *words: str) -> None:
    main(["check", str(path), f"handover={handover}", f"data.root={digits}", f"images={IMAGES}", *words])


def refusal(capsys: pytest.CaptureFixture[str], path: Path, handover: Path, digits: Path, *words: str) -> str:
    with pytest.raises(SystemExit) as left:
        check(path, handover, digits, *words)
    said = capsys.readouterr().err
    assert left.value.code == 2
    return said.splitlines()[-1]


def test_an_entry_is_what_the_certificate_says(made: Path, results: Path) -> None:
    entry, said = json.loads(made.read_text()), json.loads((results / "certificate.json").read_text())
    jsonschema.validate(entry, SCHEMA)
    assert entry["clean"] == pytest.approx(100 * said["clean"], abs=1e-3)
    assert list(entry["curves"]) == ["l2"]
    for eps, share in said["accuracy"].items():
        point = entry["curves"]["l2"][eps]
        assert point["certified"] == pytest.approx(100 * share["certified"], abs=1e-3)
        assert point["attacked"] == pytest.approx(100 * share["pgd"], abs=1e-3)
        assert point["attack"] == "PGD-5"
    assert (entry["training"], entry["published"], entry["images"]) == ("8 epochs on one core", False, IMAGES)


@pytest.mark.slow
def test_a_right_entry_is_found_again(
    made: Path, results: Path, handover: Path, digits: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The figures alone reproduce the entry, and so do the figures with the rows."""
    check(made, handover, digits, f"results=[{results}]")
    shown = capsys.readouterr().out
    assert f"OK: {made}" in shown
    assert f"l2 0.05, {IMAGES} images: certified" in shown


def test_a_changed_hash_is_refused(
    changed: Callable[..., Path], handover: Path, digits: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = changed(lambda entry: entry.update(weights_sha256="0" * 64))
    assert "not 0000000000000000" in refusal(capsys, other, handover, digits)
    other = changed(lambda entry: entry.update(images_sha256="0" * 64))
    assert "are not those of the entry (images_sha256)" in refusal(capsys, other, handover, digits)


def test_a_changed_figure_is_refused(
    changed: Callable[..., Path], made: Path, results: Path, handover: Path, digits: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The cases change parameters, one clean image, some certified shares, and a figure that only the rows reveal."""
    other = changed(lambda entry: entry.update(parameters=entry["parameters"] + 1))
    assert "parameters, not" in refusal(capsys, other, handover, digits)
    other = changed(lambda entry: entry.update(clean=entry["clean"] + 100 / IMAGES))
    assert "clean is" in refusal(capsys, other, handover, digits)

    def promise(entry: dict[str, Any]) -> None:
        point = entry["curves"]["l2"]["0.3"]
        point["certified"] = point["attacked"]

    point = json.loads(made.read_text())["curves"]["l2"]["0.3"]
    assert point["certified"] + 5 < point["attacked"], "the model is too good for this test"
    assert "are certified again" in refusal(capsys, changed(promise), handover, digits)
    near = changed(lambda entry: entry["curves"]["l2"]["0.3"].update(certified=point["certified"] + 1))
    assert "in the rows" in refusal(capsys, near, handover, digits, f"results=[{results}]")


def test_figures_of_others_and_other_methods_are_not_done_again(
    changed: Callable[..., Path], handover: Path, digits: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    published = changed(lambda entry: (entry.update(published=True), [entry.pop(key) for key in PROVED]))
    assert "a figure published by others" in refusal(capsys, published, handover, digits)
    other = changed(lambda entry: entry.update(method="global Lipschitz bound"))
    assert "cannot be rechecked" in refusal(capsys, other, handover, digits)


def test_an_entry_says_in_which_type_its_model_is_served(
    made: Path, results: Path, handover: Path, digits: Path, changed: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The default of `certify` is float32; null means the float64 function."""
    entry = json.loads(made.read_text())
    assert entry["served_dtype"] == "float32"
    assert "served in float32, rounding included" in entry["soundness"]
    assert "served_dtype=float32" in entry["command"]
    exact = changed(lambda entry: entry.update(served_dtype=None, sound="exact"))
    jsonschema.validate(json.loads(exact.read_text()), SCHEMA)
    assert "are of served_dtype=float32" in refusal(capsys, exact, handover, digits, f"results=[{results}]")
    other = changed(lambda entry: entry.update(method="crown"))
    assert "served_dtype='float32': set null, or one of" in refusal(capsys, other, handover, digits)
    other = changed(lambda entry: entry.update(served_dtype="float16"))
    assert "served_dtype is 'float16'" in refusal(capsys, other, handover, digits)


def test_a_forged_row_is_found(results: Path, made: Path) -> None:
    """A forged radius or prediction is found; differences that another nonce can cause are accepted."""
    entry = json.loads(made.read_text())
    rows = rows_of([results], entry)
    again = [dict(row) for row in rows["l2"].values() if row["radius.adjoint"] > 0][:1]
    assert list(forged("l2", again, rows, "adjoint")) == []
    row = rows["l2"][str(again[0]["key"])]
    row["radius.adjoint"] *= 1.01
    assert list(forged("l2", again, rows, "adjoint")) == []
    row["radius.adjoint"] *= 0.5  # an earlier version, which proved less
    assert list(forged("l2", again, rows, "adjoint")) == []
    row["radius.adjoint"] *= 2.4
    assert "its row says" in next(forged("l2", again, rows, "adjoint"))
    row["prediction"] += 1
    assert "another label or prediction" in next(forged("l2", again, rows, "adjoint"))
    with pytest.raises(UserError, match="are of other weights"):
        rows_of([results], entry | {"weights_sha256": "0" * 64})


def test_results_of_two_models_make_no_entry(results: Path) -> None:
    summary = summary_of(results)
    with pytest.raises(UserError, match="differ in weights_sha256"):
        entry_of([summary, summary | {"weights_sha256": "0" * 64}])
    with pytest.raises(UserError, match="differ in images_sha256"):
        entry_of([summary, summary | {"norm": "linf", "images_sha256": "0" * 64}])


def test_a_folder_without_results_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, fix in (
        (["submit", f"results={tmp_path}"], "finish python -m certify there first"),
        (["submit"], "set what to certify"),
        (["check"], "name one entry"),
        (["check", str(tmp_path / "none.json")], "cannot be read"),
    ):
        with pytest.raises(SystemExit):
            main(words)
        assert fix in capsys.readouterr().err


def test_how_far_off_a_claim_is_seen() -> None:
    """Check the rates at the head of certify/leaderboard/recheck.py, and that a right claim is almost never refused."""
    for n, points in ((50, 0.32), (200, 0.15), (500, 0.085), (1000, 0.02)):
        for truth in (0.3, 0.5):
            assert not likely(round(n * truth), n, 1000 * (truth + points), 1000)
            assert likely(round(n * truth), n, 1000 * truth, 1000)
    assert likely(30, 30, 12, 1000)  # a stronger proof or a weaker attack is not a fault of the claim


def test_chances_are_roundedat_most() -> None:
    assert [at_most(chance) for chance in (3.1e-8, 3e-8, 9.5e-8, 0.0)] == ["4e-08", "3e-08", "1e-07", "0"]
