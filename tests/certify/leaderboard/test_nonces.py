"""A chosen nonce is refused: a result counts only if its nonce was drawn or derives from fixed data."""

import hashlib
import json
from pathlib import Path
from typing import Any

import jsonschema
import pandas as pd
import pytest

from certify.__main__ import main
from certify.leaderboard import nonces
from certify.leaderboard.of_results import failure_of
from certify.leaderboard.rows import rows_of
from certify.rows.draws import derived_nonce
from certify.rows.summary import chances
from certizoo import UserError
from tests.tools.leaderboard_files import OURS, SCHEMA

BEACON = "drand 4711: 8b0c"
ASKED = ["images=3", "eps=[0.05]", "headline_eps=0.05", "attack.steps=2", "method=adjoint", "data=digits"]


def certified(handover: Path, digits: Path, out: Path, *words: str, chance: bool = True) -> dict[str, Any]:
    """Return a summary with the given failure probability, which this small model would not have by itself."""
    main([f"handover={handover}", f"out={out}", *ASKED, f"data.root={digits}", *words])
    said: dict[str, Any] = json.loads((out / "certificate.json").read_text())
    if chance:
        said["numerics"] |= {"failure_probability_of_an_image": 1e-8, "failure_probability_of_the_table": 3e-8}
        (out / "certificate.json").write_text(json.dumps(said))
    return said


def submitted(handover: Path, results: Path, out: Path) -> Path:
    main(["submit", f"handover={handover}", f"results={results}", f"out={out}"])
    jsonschema.validate(json.loads(out.read_text()), SCHEMA)
    return out


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as left:
        main(list(words))
    assert left.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


@pytest.fixture(scope="module")
def derived(handover: Path, digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("derived")
    certified(handover, digits, out, f"beacon={BEACON}")
    return out


def test_a_derived_nonce_is_that_of_weights_images_and_beacon(derived: Path) -> None:
    said = json.loads((derived / "certificate.json").read_text())
    lines = f"{said['weights_sha256']}\n{said['images_sha256']}\n{BEACON}\n"
    assert said["nonce"] == "d" + hashlib.sha256(lines.encode()).hexdigest()
    assert (said["nonce_origin"], said["beacon"]) == ("derived", BEACON)
    assert f"'beacon={BEACON}'" in (derived / "report.html").read_text().replace("&#x27;", "'")


def test_each_of_the_three_decides() -> None:
    one = derived_nonce("a" * 64, "b" * 64, "c")
    assert len({one, derived_nonce("b" * 64, "a" * 64, "c"), derived_nonce("a" * 64, "b" * 64, "d")}) == 3
    for beacon in ("", "two\nlines", "\ud800"):
        with pytest.raises(UserError, match="beacon="):
            derived_nonce("a" * 64, "b" * 64, beacon)


def test_a_derived_nonce_is_submitted_and_derived_again(
    derived: Path, handover: Path, digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A nonce that does not derive from the entry's own weights, images and beacon is refused."""
    path = submitted(handover, derived, tmp_path / "entry.json")
    check = ["check", str(path), f"handover={handover}", f"data.root={digits}", "images=1", f"results=[{derived}]"]
    main(check)
    assert "nonces: derived" in capsys.readouterr().out
    entry = json.loads(path.read_text())
    for change in ({"beacon": "another"}, {"beacon": None}, {"nonce": "d" + "0" * 64}, {"origin": "found"}):
        path.write_text(json.dumps(entry | {"nonces": [entry["nonces"][0] | change]}))
        assert "the nonce" in refusal(capsys, *check)
    path.write_text(json.dumps(entry | {"nonces": [entry["nonces"][0] | {"origin": "given"}]}))
    assert "was given, and may be the best of many" in refusal(capsys, *check)


def test_a_given_nonce_is_refused_where_chance_decides(
    handover: Path, digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = certified(handover, digits, tmp_path / "chance", "nonce=mine")
    assert (said["nonce"], said["nonce_origin"], said["beacon"]) == ("mine", "given", None)
    words = refusal(capsys, "submit", f"handover={handover}", f"results={tmp_path / 'chance'}")
    assert "the nonce 'mine' was given" in words
    with pytest.raises(UserError, match="the nonce 'mine' was given"):
        rows_of([tmp_path / "chance"], said)
    said = certified(handover, digits, tmp_path / "none", "nonce=mine", chance=False)
    assert said["numerics"]["failure_probability_of_the_table"] == 0
    entry = json.loads(submitted(handover, tmp_path / "none", tmp_path / "entry.json").read_text())
    assert entry["failure_probability"] == 0


def test_a_nonce_and_a_beacon_are_too_much(
    handover: Path, digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"handover={handover}", f"out={tmp_path}", *ASKED, f"data.root={digits}", "nonce=n", "beacon=b"]
    assert "exclude each other" in refusal(capsys, *words)


def test_an_unknown_origin_is_that_of_five_certificates_alone(
    derived: Path, handover: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Theirs was not recorded. Neither another nonce nor their nonce on other weights has it."""
    assert nonces.origins(OURS) == "unknown"
    assert list(nonces.of_entry(OURS)) == []
    one = OURS["nonces"][0]
    for change in ({"nonces": [one | {"nonce": "n1"}]}, {"weights_sha256": "0" * 64}):
        assert "has the origin 'unknown'; it must be one of" in next(nonces.of_entry(OURS | change))
    for name in ("certificates.jsonl", "certificates.parquet"):
        (tmp_path / name).write_bytes((derived / name).read_bytes())
    for nonce in ("n1", one["nonce"]):
        said = json.loads((derived / "certificate.json").read_text()) | {"nonce": nonce, "nonce_origin": "unknown"}
        (tmp_path / "certificate.json").write_text(json.dumps(said))
        words = refusal(capsys, "submit", f"handover={handover}", f"results={tmp_path}")
        assert "has the origin 'unknown'" in words


def test_a_table_fails_where_any_of_its_images_does() -> None:
    """The failure probability covers the union over all images and over several results."""
    table = pd.DataFrame({"failure": [1e-8, 2e-8, 5e-8, 4e-8], "correct": [True, True, False, True]})
    found = chances(table)
    assert found["failure_probability_of_an_image"] == 5e-8
    assert 7e-8 <= found["failure_probability_of_the_table"] <= 7e-8 * (1 + 1e-8)
    assert chances(table.assign(failure=0.9))["failure_probability_of_the_table"] == 1
    other = {"numerics": {"failure_probability_of_the_table": 1e-4}}
    assert 1.0007e-4 <= failure_of([{"numerics": found}, other]) <= 1.0008e-4
