"""Results belong to exactly their images and one writer, or they are refused in one line."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import zoo
from certify.evaluation import run as evaluation
from certify.leaderboard.of_results import summary_of
from certify.papers import analysis, feature_report
from certify.rows import records
from certify.rows.images import image_list
from certify.stage import register
from certify.stage import run as stage
from certizoo import UserError
from certizoo.attacks import AttackConfig
from certizoo.locks import sole_writer
from tests.tools.cases import mostly_slow
from tests.tools.stage_runs import CONFIG, data

FEW = stage.Settings(
    method="lofast", images=12, eps=(0.01, 0.1), batch_size=6, nonce="one",
    attack=AttackConfig(norm="l2", steps=3, loss="margin")
)  # fmt: skip
PGD = {"pgd": {"kind": "pgd", "norm": "l2", "eps": 0.1, "steps": 3}}
ATTACKED = evaluation.Settings(
    "test", PGD, method="lofast", images=12, block=6, batch_size=6, check_images=0, nonce="one"
)
Rows = list[dict[str, Any]]


def stage_run(handover: Path, digits: Path, out: Path) -> None:
    stage.run(handover, data(digits), FEW, out)


def evaluation_run(handover: Path, digits: Path, out: Path) -> None:
    evaluation.run(handover, data(digits), ATTACKED, out)


RUNS = {"stage": stage_run, "evaluation": evaluation_run}
FILES = {"stage": (stage.ROWS, stage.TABLE, stage.CERTIFICATE),
         "evaluation": (evaluation.ROWS, evaluation.TABLE, evaluation.EVALUATION)}  # fmt: skip


@pytest.fixture(scope="module")
def finished(handover: Path, digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with stage/ and evaluation/, each with all its rows."""
    folder = tmp_path_factory.mktemp("finished")
    for name, run in RUNS.items():
        run(handover, digits, folder / name)
    return folder


@pytest.fixture
def out(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished, tmp_path / "out")
    return tmp_path / "out"


def change(place: int, **values: object) -> Callable[[Rows], Rows]:
    def changed(rows: Rows) -> Rows:
        return [row | values if i == place else row for i, row in enumerate(rows)]

    return changed


def without(place: int, name: str) -> Callable[[Rows], Rows]:
    def changed(rows: Rows) -> Rows:
        return [{k: v for k, v in row.items() if k != name} if i == place else row for i, row in enumerate(rows)]

    return changed


# (change to the rows of a stopped run, number of the first wrong line)
MIXED: dict[str, tuple[Callable[[Rows], Rows], int]] = {
    "two writers": (lambda rows: [row for row in rows for _ in range(2)], 2),
    "one start after the other": (lambda rows: rows + rows, 13),
    "a twin in the place of another": (lambda rows: [*rows[:5], rows[4], *rows[6:]], 6),
    "one left out": (lambda rows: rows[:3] + rows[4:], 4),
    "two have changed places": (lambda rows: [rows[1], rows[0], *rows[2:]], 1),
    "backwards": (lambda rows: rows[::-1], 1),
    "another key": (change(2, key="other"), 3),
    "no key": (without(0, "key"), 1),
    "another label": (change(7, label=11), 8),
    "a label of another type": (change(0, label=True), 1),
    "no margin": (without(3, "margin"), 4),
    "a column too many": (change(3, believe="me"), 4),
    "a radius that is no number": (change(1, **{"radius.lofast": "1"}), 2),
    "a radius of NaN": (change(1, **{"radius.lofast": float("nan")}), 2),
    "an infinite radius": (change(1, **{"radius.lofast": float("inf")}), 2),
    "a negative radius": (change(1, **{"radius.lofast": -1.0}), 2),
    "no radius": (change(1, **{"radius.lofast": None}), 2),
    "a failure that is no chance": (change(1, failure=2.0), 2),
    "correct in words": (change(1, correct="yes"), 2),
    "correct with another prediction": (change(0, correct=True, prediction=99), 1),
}


@pytest.mark.hostile
@pytest.mark.parametrize("kind", RUNS)
@pytest.mark.parametrize("case", mostly_slow(MIXED, *list(MIXED)[::4]))
def test_mixed_rows_are_refused_and_left_as_they_are(
    case: str, kind: str, handover: Path, digits: Path, out: Path
) -> None:
    path, summary = out / kind / FILES[kind][0], out / kind / FILES[kind][2]
    mix, line = MIXED[case]
    rows = mix([json.loads(text) for text in path.read_text().splitlines()])
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary.unlink()
    before = path.read_bytes()
    with pytest.raises(UserError, match=rf"{path.name}: line {line} .*; remove .*head -n {line - 1}") as refused:
        RUNS[kind](handover, digits, out / kind)
    assert "\n" not in str(refused.value)
    assert path.read_bytes() == before
    assert not summary.exists()


@pytest.mark.hostile
@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"radius.lofast": 5.0, "certified.0.01": "not certified"}, "radius 5.0 but is not certified"),
        ({"certified.0.1": "certified", "pgd.0.1": False}, "an attack succeeds"),
        ({"certified.0.1": "maybe"}, "certified.0.1=maybe"),
        ({"certified.0.1": "certified", "pgd.0.1": True, "correct": False}, "the prediction is wrong"),
    ],
)  # fmt: skip
def test_rows_that_contradict_themselves_are_refused(
    columns: dict[str, object], words: str, handover: Path, digits: Path, out: Path
) -> None:
    path = out / "stage" / stage.ROWS
    rows = change(0, **columns)([json.loads(text) for text in path.read_text().splitlines()])
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (out / "stage" / stage.CERTIFICATE).unlink()
    with pytest.raises(UserError, match=words):
        stage_run(handover, digits, out / "stage")


@pytest.mark.hostile
@pytest.mark.parametrize("line", [b"[]", b"7", b"{", b"", b"\xff\xfe", b"[" * 100_000, b"9" * 5000, b"null"])
def test_lines_that_are_not_rows_are_refused(line: bytes, handover: Path, digits: Path, out: Path) -> None:
    path = out / "stage" / stage.ROWS
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], line + b"\n", *lines[1:]]))
    (out / "stage" / stage.CERTIFICATE).unlink()
    with pytest.raises(UserError, match="line 2 is not a row"):
        stage_run(handover, digits, out / "stage")


@pytest.mark.hostile
@pytest.mark.parametrize("note", [None, "[]", "{", "{}", "7", '{"images": 12}', "x" * 5_000_000])
def test_rows_without_their_subject_are_refused(note: str | None, handover: Path, digits: Path, out: Path) -> None:
    (out / "stage" / records.SUBJECT).unlink()
    if note is not None:
        (out / "stage" / records.SUBJECT).write_text(note)
    with pytest.raises(UserError, match=r"subject\.json|another"):
        stage_run(handover, digits, out / "stage")


@pytest.mark.hostile
@pytest.mark.parametrize("kind", RUNS)
def test_results_without_a_key_of_this_version_are_refused(kind: str, finished: Path, tmp_path: Path) -> None:
    """No earlier key is guessed: the command names the key and what to do."""
    for name, read in ((records.SUBJECT, records.subject_in), (FILES[kind][2], summary_of)):
        said = json.loads((finished / kind / name).read_text())
        for key in records.KEYS:
            (tmp_path / name).write_text(json.dumps({k: value for k, value in said.items() if k != key}))
            with pytest.raises(UserError, match=f"{name} was written by another version, as its {key} is missing"):
                read(tmp_path)
        (tmp_path / name).write_text(json.dumps(said | {"first": True}))
        with pytest.raises(UserError, match="its first is missing or invalid"):
            read(tmp_path)


@pytest.mark.hostile
@pytest.mark.parametrize("kind", RUNS)
@pytest.mark.parametrize("lines", mostly_slow((0, 8, 11), 8))
def test_a_summary_is_not_rebuilt_from_changed_rows(
    kind: str, lines: int, handover: Path, digits: Path, out: Path
) -> None:
    """The rows are cut to some lines, or edited so that nothing in a row contradicts the rest."""
    path = out / kind / FILES[kind][0]
    rows = path.read_text().splitlines(keepends=True)
    edited = json.loads(rows[11])
    edited["margin"] += 1e-3
    path.write_text("".join(rows[:lines]) + (json.dumps(edited) + "\n" if lines == 11 else ""))
    with pytest.raises(UserError, match=f"{FILES[kind][2]} was not made from the {path.name} beside it"):
        RUNS[kind](handover, digits, out / kind)
    if lines < 11:  # the advice in the error works
        (out / kind / FILES[kind][2]).unlink()
        RUNS[kind](handover, digits, out / kind)
        assert len(path.read_text().splitlines()) == 12


@pytest.mark.hostile
def test_a_certificate_is_not_published_with_the_rows_of_another(handover: Path, out: Path) -> None:
    table = pd.read_parquet(out / "stage" / stage.TABLE)
    table["radius.lofast"] = 1.0
    table.to_parquet(out / "stage" / stage.TABLE, index=False)
    with pytest.raises(UserError, match=r"certificate\.json was not made from the certificates\.parquet beside it"):
        register.publish(handover, out / "stage", registered_name="digits", experiment="test")


def test_other_pixels_under_the_same_names_are_another_subject(
    handover: Path, digits: Path, out: Path, tmp_path: Path
) -> None:
    """The digest of shards without a manifest covers names and sizes only."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for path in digits.glob("*.tar"):
            shutil.copy(path, tmp_path / name)
    shard = min((tmp_path / "b").glob("digits-test-*.tar"))
    content = bytearray(shard.read_bytes())
    at = content.index(b"IDAT") + 12
    content[at] ^= 1
    shard.write_bytes(content)
    stage.run(handover, data(tmp_path / "a"), FEW, tmp_path / "out")
    with pytest.raises(UserError, match="another images_sha256"):
        stage.run(handover, data(tmp_path / "b"), FEW, tmp_path / "out")


@pytest.mark.parametrize(("kind", "other"), [("stage", "evaluation"), ("evaluation", "stage")])
def test_one_folder_is_of_one_command(kind: str, other: str, handover: Path, digits: Path, out: Path) -> None:
    before = {path: path.read_bytes() for path in (out / other).iterdir()}
    with pytest.raises(UserError, match="holds results with another"):
        RUNS[kind](handover, digits, out / other)
    assert {path: path.read_bytes() for path in (out / other).iterdir()} == before


def test_a_start_that_ended_before_its_first_row_binds_nothing(handover: Path, digits: Path, tmp_path: Path) -> None:
    """A subject without rows does not restrict the next start."""
    stage_run(handover, digits, tmp_path)
    for path in (stage.ROWS, stage.CERTIFICATE):
        (tmp_path / path).unlink()
    stage.run(handover, data(digits), replace(FEW, eps=(0.1,)), tmp_path)
    with pytest.raises(UserError, match="another eps"):
        stage_run(handover, digits, tmp_path)


HOLD = """
import sys, time
from pathlib import Path
from certizoo.locks import sole_writer
with sole_writer(Path(sys.argv[1]), "results", "x"):
    print("held", flush=True)
    time.sleep(60)
"""
COMMANDS: dict[str, tuple[str, Callable[[Path, Path, Path], object]]] = {
    "stage": ("", stage_run),
    "evaluation": ("", evaluation_run),
    "features": (
        "",
        lambda handover, digits, out: feature_report.run(
            handover, None, data(digits), feature_report.Settings(images=20, perplexity=5), out
        ),
    ),
    "analyse": (
        analysis.FOLDER,
        lambda handover, digits, out: analysis.run(
            handover, data(digits), analysis.Settings(images=1, attention_images=1, eps=(0.1,), samples=1), out
        ),
    ),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_second_start_in_a_folder_is_refused_at_once_and_writes_nothing(
    name: str, handover: Path, digits: Path, tmp_path: Path
) -> None:
    folder, run = COMMANDS[name]
    command = [sys.executable, "-c", HOLD, str(tmp_path / folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        first.stdout.readline()
        before = sorted(tmp_path.rglob("*"))
        try:
            with pytest.raises(UserError, match=f"process {first.pid} .*choose another out=DIR"):
                run(handover, digits, tmp_path)
        finally:
            first.kill()
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_is_free_again_after_a_start_and_after_a_refusal(handover: Path, digits: Path, out: Path) -> None:
    stage_run(handover, digits, out / "stage")
    with pytest.raises(UserError, match="another"):
        stage.run(handover, data(digits), replace(FEW, eps=(0.1,)), out / "stage")
    with sole_writer(out / "stage", "results", "x"):
        pass


# settings that change no row beyond rounding, and the reason
NO_ROW = {
    stage.Settings: {
        "batch_size": 7, "on": "ray", "workers": 2, "device": "cuda",
        "beacon": "b",  # the nonce derives from it
    },
    evaluation.Settings: {
        "batch_size": 7, "on": "ray", "workers": 2, "device": "cuda", "check_images": 3,
        "certificate": Path("there"),  # the method and nonce are part of the subject
    },
}  # fmt: skip
OTHER: dict[type, dict[str, Any]] = {
    stage.Settings: {
        "method": "adjoint", "norm": "linf", "images": 11,
        "eps": (0.02, 0.1), "headline_eps": 0.01, "search_radii": False, "served_dtype": None,
        "nonce": "another",
        "attack": replace(FEW.attack, steps=4),
    },
    evaluation.Settings: {
        "protocol": "other", "attacks": {"pgd": {**PGD["pgd"], "steps": 4}}, "method": None, "images": 11, "block": 4,
        "seed": 1, "attack_dtype": "bfloat16", "nonce": "another", "norm": "linf",
        "served_dtype": None,
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", [stage.Settings, evaluation.Settings])
def test_every_setting_that_changes_a_row_is_part_of_the_subject(kind: type, digits: Path) -> None:
    """`subject_of` records `images` by their number and digest."""
    settings: Any = FEW if kind is stage.Settings else ATTACKED
    asked: Any = stage._asked if kind is stage.Settings else evaluation._asked
    assert {field.name for field in fields(kind)} == set(NO_ROW[kind]) | set(OTHER[kind])
    for name, value in OTHER[kind].items():
        also: dict[str, Any] = {"method": "adjoint"} if name == "served_dtype" else {}
        if name == "norm" and kind is stage.Settings:
            also = {"headline_eps": 0.1}
        first, other = replace(settings, **also), replace(settings, **also | {name: value})
        assert (asked(first) != asked(other)) == (name != "images"), name
    for name, value in NO_ROW[kind].items():
        assert asked(settings) == asked(replace(settings, **{name: value})), name


@pytest.mark.parametrize("field", [field.name for field in fields(AttackConfig)])
def test_every_setting_of_the_attack_is_part_of_the_subject(field: str) -> None:
    assert field in stage._asked(FEW)["attack"]


MIXED_UP: dict[str, Callable[[Rows], Rows]] = {
    "reversed": lambda rows: rows[::-1],
    "too few": lambda rows: rows[:-1],
    "one twice": lambda rows: rows + rows[-1:],
    "other keys": lambda rows: [row | {"key": "other"} for row in rows],
    "without figures": lambda rows: [{"key": row["key"], "label": row["label"]} for row in rows],
    "none": lambda rows: [],
}


@pytest.mark.parametrize("wrong", mostly_slow(MIXED_UP, "reversed", "without figures"))
def test_rows_that_a_worker_mixes_up_are_not_written(
    wrong: str, handover: Path, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of two batches is mixed up."""
    right = stage.CertifyBatch.__call__

    def call(self: stage.CertifyBatch, batch: Any) -> Rows:
        rows = right(self, batch)
        self.batches = getattr(self, "batches", 0) + 1  # type: ignore[attr-defined]
        return MIXED_UP[wrong](rows) if self.batches == 2 else rows  # type: ignore[attr-defined]

    monkeypatch.setattr(stage.CertifyBatch, "__call__", call)
    with pytest.raises(UserError, match=r"report this$"):
        stage_run(handover, digits, tmp_path)
    kept = [json.loads(line)["key"] for line in (tmp_path / stage.ROWS).read_text().splitlines()]
    assert kept == [image.key for image in image_list(data(digits), 12, 6).images][: len(kept)]
    assert 6 <= len(kept) < 12
    assert not (tmp_path / stage.CERTIFICATE).exists()
    monkeypatch.undo()
    stage_run(handover, digits, tmp_path)
    assert len(pd.read_parquet(tmp_path / stage.TABLE)) == 12


def test_an_untrained_model_has_results_too(digits: Path, tmp_path: Path) -> None:
    """With nothing correct and nothing certified, no row is refused."""
    torch.manual_seed(1)
    zoo.handover.save(tmp_path / "handover", zoo.create_model(**CONFIG), CONFIG, {})
    for run in RUNS.values():
        run(tmp_path / "handover", digits, tmp_path / run.__name__)
        run(tmp_path / "handover", digits, tmp_path / run.__name__)
