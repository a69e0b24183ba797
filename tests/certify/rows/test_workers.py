"""The certify stage over several processes gives the same rows in the same order; a kill or Ctrl-C costs one line."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import active_children
from pathlib import Path

import pandas as pd
import psutil  # type: ignore[import-untyped]
import pytest
import torch

from certify.__main__ import main
from certify.rows import records
from certify.rows.devices import device_of
from certify.stage import run as stage
from certizoo import UserError
from certizoo.locks import sole_writer
from tests.tools.cases import mostly_slow
from tests.tools.launching import ROOT
from tests.tools.stage_runs import SETTINGS, data

FEW = replace(SETTINGS, images=50, batch_size=10, eps=(0.01, 0.1))


@pytest.fixture(autouse=True)
def no_worker_survives() -> Iterator[None]:
    yield
    for worker in active_children():
        worker.join(20)
    assert not active_children()


@pytest.mark.slow
def test_two_processes_write_the_rows_of_one(handover: Path, digits: Path, tmp_path: Path) -> None:
    one = stage.run(handover, data(digits), FEW, tmp_path / "one")
    done: list[int] = []
    two = stage.run(
        handover, data(digits), replace(FEW, workers=2), tmp_path / "two", progress=lambda now, total: done.append(now)
    )
    assert done == [0, 10, 20, 30, 40, 50]
    one_table, two_table = (
        pd.read_parquet(tmp_path / name / "certificates.parquet").drop(columns=["seconds", "served_difference"])
        for name in ("one", "two")
    )
    # Loading normalises weights in float32, and radii and growths depend on them.
    pd.testing.assert_frame_equal(one_table, two_table, rtol=1e-5)
    for key in ("accuracy", "clean", "image_list_sha256", "weights_sha256"):
        assert one[key] == two[key]


@pytest.mark.slow
def test_a_nonce_is_drawn_once_for_a_result(handover: Path, digits: Path, tmp_path: Path) -> None:
    """Another result draws another nonce, the rows keep theirs, and a given nonce repeats them."""
    asked = replace(FEW, images=20, method="adjoint")
    one, two = (stage.run(handover, data(digits), asked, tmp_path / name) for name in ("one", "two"))
    assert len({one["nonce"], two["nonce"]}) == 2
    rows = tmp_path / "one" / stage.ROWS
    rows.write_text("".join(rows.read_text().splitlines(keepends=True)[:10]))
    (tmp_path / "one" / stage.CERTIFICATE).unlink()  # the summary records the digest of its rows
    assert stage.run(handover, data(digits), asked, tmp_path / "one")["nonce"] == one["nonce"]
    again = stage.run(handover, data(digits), replace(asked, nonce=one["nonce"], workers=2), tmp_path / "again")
    assert again["nonce"] == one["nonce"]
    before, after = (
        pd.read_parquet(tmp_path / name / "certificates.parquet").drop(columns=["seconds", "served_difference"])
        for name in ("one", "again")
    )
    pd.testing.assert_frame_equal(before, after, rtol=1e-5)
    with pytest.raises(UserError, match="another nonce"):
        stage.run(handover, data(digits), replace(asked, nonce="n0"), tmp_path / "one")


def test_a_start_without_new_rows_says_the_same(handover: Path, digits: Path, tmp_path: Path) -> None:
    first = stage.run(handover, data(digits), replace(FEW, images=10), tmp_path)
    assert first["numerics"]["largest_logit_difference_served_to_float64"] > 0
    assert stage.run(handover, data(digits), replace(FEW, images=10), tmp_path) == first


def test_a_killed_worker_is_one_line_and_the_next_start_goes_on(handover: Path, digits: Path, tmp_path: Path) -> None:
    """A worker is killed from outside after the first batch."""

    def kill(now: int, total: int) -> None:
        for worker in active_children() if now else ():
            os.kill(worker.pid or 0, signal.SIGKILL)

    with pytest.raises(UserError, match="was killed"):
        stage.run(handover, data(digits), replace(FEW, workers=2), tmp_path, progress=kill)
    rows = (tmp_path / stage.ROWS).read_text().splitlines()
    assert 10 <= len(rows) < 50
    summary = stage.run(handover, data(digits), FEW, tmp_path)
    keys = [json.loads(line)["key"] for line in (tmp_path / stage.ROWS).read_text().splitlines()]
    assert len(keys) == len(set(keys)) == summary["images"] == 50


@pytest.mark.slow
def test_workers_end_with_a_killed_parent(handover: Path, digits: Path, tmp_path: Path) -> None:
    """After SIGKILL to the parent alone its workers end, and the folder is free at once."""
    words = f"handover={handover} data=digits data.root={digits} out={tmp_path} batch_size=2 workers=2".split()
    command = [sys.executable, "-m", "certify", *words]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) as process:
        while not (tmp_path / stage.ROWS).exists():
            assert process.poll() is None
            time.sleep(0.05)
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) >= 2
        process.kill()
    assert not psutil.wait_procs(children, timeout=20)[1]
    with sole_writer(tmp_path, "results", "x"):
        pass


def test_ctrl_c_is_one_line(
    handover: Path, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(records, "append", interrupted)
    words = f"handover={handover} out={tmp_path} data=digits data.root={digits} images=20 workers=2 method=lofast"
    with pytest.raises(SystemExit) as held:  # keep the traceback, so that no frame of the stage is freed
        main(words.split())
    for worker in active_children():
        worker.join(20)
    assert not active_children(), held
    error = capsys.readouterr().err
    assert error.startswith("error: stopped")
    assert error.count("\n") == 1


def test_no_worker_is_no_answer() -> None:
    with pytest.raises(UserError, match="workers"):
        replace(FEW, workers=0)


def test_every_worker_has_a_gpu_of_its_own_while_there_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [str(device_of(worker, "cuda")) for worker in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]
    assert device_of(5, "cpu").type == "cpu"


def test_no_gpu_and_no_device_of_that_name_are_one_line(
    handover: Path, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UserError, match="use device=cpu"):
        stage.run(handover, data(digits), replace(FEW, device="cuda"), tmp_path)
    with pytest.raises(UserError, match="give one of cpu, cuda"):
        replace(FEW, device="tpu")


@pytest.mark.parametrize("dtype", mostly_slow(("float32", "bfloat16"), "bfloat16"))
def test_the_served_type_is_certified(handover: Path, digits: Path, tmp_path: Path, dtype: str) -> None:
    settings = replace(FEW, images=6, batch_size=6, method="adjoint", served_dtype=dtype, eps=(0.001, 0.1))
    numerics = stage.run(handover, data(digits), settings, tmp_path)["numerics"]
    assert numerics["served_dtype"] == dtype
    assert numerics["rounding_of_the_served_model"] == "proved"
    with pytest.raises(UserError, match="another served_dtype"):
        stage.run(handover, data(digits), replace(settings, served_dtype=None), tmp_path)


def test_a_served_type_needs_a_method_that_counts_rounding() -> None:
    assert FEW.served_dtype == "float32", "unless another is asked for"
    for changes in ({"method": "crown"}, {"method": "adjoint", "served_dtype": "float16"}):
        with pytest.raises(UserError, match="served_dtype"):
            replace(FEW, **({"served_dtype": "float32"} | changes))  # type: ignore[arg-type]
