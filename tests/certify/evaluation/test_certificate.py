"""An evaluation takes over radii from a finished certification if it would compute the same ones, else refuses."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import zoo
from certify.evaluation import run as evaluation
from certify.rows.images import Share
from certify.stage import run as stage
from certizoo import UserError
from certizoo.files import sha256
from tests.tools.stage_runs import CONFIG, data
from tests.tools.stage_runs import SETTINGS as STAGE

PGD = {"pgd": {"kind": "pgd", "norm": "l2", "eps": 0.1, "steps": 3}}
SETTINGS = evaluation.Settings("test", PGD, images=20, block=10, batch_size=10, check_images=0)


@pytest.fixture(scope="module")
def certified(handover: Path, digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("certified")
    stage.run(handover, data(digits), replace(STAGE, method="adjoint", nonce="n1", images=20, served_dtype=None), out)
    return out


def table(out: Path) -> pd.DataFrame:
    return pd.read_parquet(out / evaluation.TABLE)


@pytest.mark.slow
def test_the_rows_are_those_of_computed_radii(handover: Path, digits: Path, certified: Path, tmp_path: Path) -> None:
    evaluation.run(handover, data(digits), replace(SETTINGS, certificate=certified), tmp_path / "taken")
    evaluation.run(handover, data(digits), replace(SETTINGS, method="adjoint", nonce="n1"), tmp_path / "computed")
    taken, computed = table(tmp_path / "taken"), table(tmp_path / "computed")
    assert (taken["radius.adjoint"] > 0).any()
    times = ["seconds.certify", "seconds.pgd"]
    pd.testing.assert_frame_equal(taken.drop(columns=times), computed.drop(columns=times), rtol=1e-6)
    assert taken["seconds.certify"].tolist() == pd.read_parquet(certified / stage.TABLE)["seconds"].tolist()
    said = [json.loads((tmp_path / name / evaluation.EVALUATION).read_text()) for name in ("taken", "computed")]
    certified_share = [one["accuracy"]["pgd"]["certified"]["accuracy"] for one in said]
    assert certified_share[0] == certified_share[1] > 0
    assert said[0]["nonce"] == "n1"


def test_a_range_takes_its_own(handover: Path, digits: Path, certified: Path, tmp_path: Path) -> None:
    asked = replace(SETTINGS, images=10, certificate=certified)
    evaluation.run(handover, data(digits), asked, tmp_path, share=Share(10))
    rows = pd.read_parquet(certified / stage.TABLE)
    assert table(tmp_path)["radius.adjoint"].tolist() == rows["radius.adjoint"].tolist()[10:]


def unfinished(folder: Path) -> None:
    (folder / stage.CERTIFICATE).unlink()


def raised(folder: Path, radius: object = 9.0) -> None:
    """Change the first radius to a larger one."""
    rows = [json.loads(line) for line in (folder / stage.ROWS).read_text().splitlines()]
    rows[0]["radius.adjoint"] = radius
    (folder / stage.ROWS).write_text("".join(json.dumps(row) + "\n" for row in rows))


def unreadable(folder: Path) -> None:
    """Store a radius that is not a number, under a matching digest."""
    raised(folder, "far")
    say(rows_sha256={stage.ROWS: sha256(folder / stage.ROWS)})(folder)


def say(**said: Any) -> Callable[[Path], None]:
    """Change fields of the certificate."""

    def change(folder: Path) -> None:
        content = json.loads((folder / stage.CERTIFICATE).read_text())
        (folder / stage.CERTIFICATE).write_text(json.dumps(content | said))

    return change


@pytest.mark.parametrize(
    ("change", "asked", "said"),
    [
        (unfinished, {}, "no finished certification"),
        (raised, {}, "was changed"),
        (unreadable, {}, "radius.adjoint=far"),
        (say(weights_sha256="0"), {}, "another weights"),
        (say(data_digest="0"), {}, "another data"),
        (say(certizoo="0"), {}, "another version of certizoo"),
        (say(served_dtype="bfloat16"), {}, "served in bfloat16"),
        (say(), {"images": 30}, "has no row of image"),
        (say(), {"method": "lofast"}, "method=adjoint, not lofast"),
        (say(), {"nonce": "n2"}, "nonce=n1, not n2"),
        (say(), {"norm": "linf"}, "norm=l2, not linf"),
        (say(), {"method": None}, "method=null"),
    ],
)
def test_another_certificate_is_refused(
    handover: Path,
    digits: Path,
    certified: Path,
    tmp_path: Path,
    change: Callable[[Path], None],
    asked: dict[str, Any],
    said: str,
) -> None:
    folder, out = tmp_path / "certificate", tmp_path / "out"
    shutil.copytree(certified, folder)
    change(folder)
    with pytest.raises(UserError, match=said):
        evaluation.run(handover, data(digits), replace(SETTINGS, certificate=folder, **asked), out)
    assert not (out / evaluation.ROWS).exists()


def test_a_certificate_of_other_weights_is_refused(digits: Path, certified: Path, tmp_path: Path) -> None:
    zoo.handover.save(tmp_path / "handover", zoo.create_model(**CONFIG), CONFIG, {})
    with pytest.raises(UserError, match="another weights"):
        evaluation.run(tmp_path / "handover", data(digits), replace(SETTINGS, certificate=certified), tmp_path / "out")
