"""The stage is killed twenty times and still ends with the rows and certificate of an undisturbed run."""

import json
import os
import random
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import psutil  # type: ignore[import-untyped]
import pytest

from certify.rows import records
from certify.stage import run as stage
from tests.tools.launching import ROOT, environment

KILLS, SEED = 20, 17
TOLD = "another process writes results here"


@dataclass
class Counted:
    """Counts of events, for the report."""

    starts: int = 0
    kills: int = 0
    finished: int = 0  # starts that ended before they could be killed
    refused: int = 0  # second starts that were refused
    lost: int = 0  # rows on the disk before a kill or a start, and missing after it
    twins: int = 0
    orphans: int = 0  # workers that outlive a killed parent by more than a moment


def start(handover: Path, digits: Path, out: Path, workers: int) -> "subprocess.Popen[str]":
    words = [f"handover={handover}", f"out={out}", "data=digits", f"data.root={digits}", f"workers={workers}"]
    return subprocess.Popen(
        [sys.executable, "-m", "certify", *words, "nonce=one", "images=null", "batch_size=5"],
        cwd=ROOT, env=environment() | {"PYTHONPATH": str(ROOT)}, text=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip


def keys(out: Path) -> list[str]:
    """Return the keys of the whole lines."""
    path = out / stage.ROWS
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line)["key"] for line in lines if line.endswith("\n")]


def kill(process: "subprocess.Popen[str]", counted: Counted) -> None:
    """Send SIGKILL to the process alone; its workers have to end by themselves."""
    children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    process.kill()
    status = process.wait()
    counted.kills += status == -9
    counted.finished += status == 0
    counted.orphans += len(psutil.wait_procs(children, timeout=30)[1])


def moment(draw: random.Random, process: "subprocess.Popen[str]", out: Path, before: int) -> None:
    """Wait: half of the time for up to 10 s from the start, half for up to 2 s from its first new row."""
    if draw.random() < 0.5:
        end = time.monotonic() + draw.uniform(0, 10)
    else:
        while process.poll() is None and len(keys(out)) <= before:
            time.sleep(0.02)
        end = time.monotonic() + draw.uniform(0, 2)
    while process.poll() is None and time.monotonic() < end:
        time.sleep(0.005)


def two(handover: Path, digits: Path, out: Path, counted: Counted) -> "subprocess.Popen[str]":
    """Start two processes at once: one is refused, the other continues."""
    both = [start(handover, digits, out, 1) for _ in range(2)]
    counted.starts += 2
    while all(process.poll() is None for process in both):
        time.sleep(0.02)
    ended, other = both if both[0].poll() is not None else both[::-1]
    assert ended.stderr is not None
    said = ended.stderr.read()
    assert (ended.returncode, said.count("\n")) == (2, 1), said
    assert TOLD in said, said
    counted.refused += 1
    return other


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_twenty_kills_change_nothing(handover: Path, digits: Path, tmp_path: Path) -> None:
    begun, draw, counted = time.monotonic(), random.Random(SEED), Counted()
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert start(handover, digits, whole, 1).wait() == 0
    while counted.kills < KILLS:
        if counted.starts and counted.finished:  # start again from nothing: there is nothing left to disturb
            counted.finished, done = 0, keys(out)
            (out / stage.ROWS).write_text("".join((out / stage.ROWS).read_text().splitlines(keepends=True)[:40]))
            (out / stage.CERTIFICATE).unlink(missing_ok=True)
            assert done == keys(whole)
        before = keys(out)
        if counted.kills % 5 == 2:
            process = two(handover, digits, out, counted)
        else:
            process = start(handover, digits, out, workers=1 + counted.kills % 2)
            counted.starts += 1
        moment(draw, process, out, len(before))
        kill(process, counted)
        after = keys(out)
        counted.lost += len(set(before) - set(after))
        counted.twins += len(after) - len(set(after))
    assert start(handover, digits, out, 1).wait() == 0
    one, other = (pd.read_parquet(folder / stage.TABLE).filter(regex="^(?!seconds)") for folder in (whole, out))
    print(f"{counted}, seed {SEED}, {int((one == other).all(axis=1).sum())} of {len(one)} rows equal bit for bit, "
          f"{(time.monotonic() - begun) / 60:.1f} minutes, {os.cpu_count()} cores")  # fmt: skip
    assert (counted.lost, counted.twins, counted.orphans) == (0, 0, 0)
    assert counted.refused >= KILLS // 5
    # A resumed batch has another size, for which float32 rounds differently.
    pd.testing.assert_frame_equal(
        one.drop(columns="served_difference"), other.drop(columns="served_difference"), rtol=1e-5
    )
    first, second = (json.loads((folder / stage.CERTIFICATE).read_text()) for folder in (whole, out))
    for said in (first, second):
        assert said.pop(records.DIGESTS)
        said.pop("seconds_per_image"), said.pop("breakdown")
        said["numerics"].pop("largest_logit_difference_served_to_float64")
    assert first.pop("median_radius") == pytest.approx(second.pop("median_radius"), rel=1e-5)
    assert first == second
