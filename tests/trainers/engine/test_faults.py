"""The parts that handle faults: signals, a silent rank, damaged checkpoints. Whole runs: *_slow.py."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
import torch
from safetensors import SafetensorError

from certizoo import UserError
from certizoo.files import sha256
from tests.tools.full_disk import full_disk
from tests.tools.launching import ROOT, environment
from tests.tools.trained import Alone, Trained
from trainers.engine import launcher, preempt
from trainers.job import checkpoint
from trainers.job.checkpoint import Position, Saved
from trainers.settings import TrainConfig
from trainers.steps.loop import checkpoint_due
from trainers.steps.report import ROWS, Report
from trainers.weights import saving, states

RANK = states.rank_file(0)


def python(code: str, cwd: Path, seconds: float = 120) -> "subprocess.CompletedProcess[str]":
    env = environment() | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=cwd, env=env, text=True, capture_output=True, timeout=seconds)


# --- signals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", preempt.SIGNALS)
def test_a_signal_becomes_a_request(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with suppress(preempt.Stopped), preempt.listening() as request:
        assert not request.agreed(Alone())  # type: ignore[arg-type]
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)  # the cluster's signal, and the launcher's copy of it
        assert request.agreed(Alone())  # type: ignore[arg-type]
        assert request.reason == number.name
        raise preempt.Stopped
    assert preempt.Stopped().code == 0
    assert signal.getsignal(number) == before


def test_a_launcher_that_died_counts_as_a_request() -> None:
    """It counts even before its end has been collected (a zombie)."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = psutil.Process(child.pid)
    assert not launcher.ended(process)
    child.kill()
    while process.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    assert launcher.ended(process)
    child.communicate(timeout=10)
    assert launcher.ended(process)


RANKS = """
import subprocess, sys, time
import psutil
from trainers.engine import launcher
ends = ["input()", "import os; os.kill(os.getpid(), 9)", "raise SystemExit(1)"]
for end in ends:
    child = subprocess.Popen([sys.executable, "-c", end], stdin=subprocess.PIPE)
while sum(each.status() == psutil.STATUS_ZOMBIE for each in psutil.Process().children()) < 2:
    time.sleep(0.01)
launcher.launchers = lambda: (psutil.Process(),)
print(launcher.killed())
"""


def test_a_rank_that_was_killed_is_named_by_those_beside_it(tmp_path: Path) -> None:
    """One rank lives, one was killed, one ended with its own message; none has been collected."""
    done = python(RANKS, tmp_path)
    assert done.stdout == "['rank 1 was killed (SIGKILL): out of memory?']\n", done.stderr


SECOND = """
import os, signal, time
from trainers.engine import launcher, preempt
preempt.SAME_REQUEST = 0.5
with preempt.listening() as request:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(1.0)
    print("one", flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    print("two", flush=True)
"""
LATE = """
import os, signal
from trainers.engine import launcher, preempt
with preempt.listening():
    os.kill(os.getpid(), signal.SIGTERM)
print("on and on")
"""


def test_the_second_signal_ends_the_process(tmp_path: Path) -> None:
    done = python(SECOND, tmp_path)
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "one\n"), done.stderr


def test_a_signal_that_nobody_acted_on_is_not_lost(tmp_path: Path) -> None:
    done = python(LATE, tmp_path)
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, ""), done.stderr


# --- a rank in which nothing happens ---------------------------------------------------------------------------------

STUCK = """
import time
from pathlib import Path
from trainers.engine.watchdog import Watchdog
watchdog = Watchdog(1.5, 3, Path("logs/rank3.log"), grace=0.2)
with watchdog.watching():
    for _ in range(8):
        time.sleep(0.3)
        watchdog.heartbeat()
    print("lived", flush=True)
    time.sleep(60)
"""


def test_silence_ends_the_process_with_one_line(tmp_path: Path) -> None:
    done = python(STUCK, tmp_path)
    assert done.returncode == 1
    assert done.stdout == "lived\n", "heartbeats keep it going longer than its patience"
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: no step in 0.025 minutes (deepspeed.timeout_minutes): rank 3 is stuck")
    assert "resume=auto" in line
    assert "Current thread" in (tmp_path / "logs" / "rank3.log").read_text()


# --- checkpoints -----------------------------------------------------------------------------------------------------


@contextmanager
def patched_disk(fault: Exception | None) -> Iterator[None]:
    """Write files until the disk reports `fault`."""
    with pytest.MonkeyPatch.context() as patch:

        def write_file(path: Path, tensors: dict[str, torch.Tensor]) -> None:
            write_whole(path, tensors)
            if fault:
                raise fault

        write_whole = states.write_file
        patch.setattr(states, "write_file", write_file)
        yield


def write(run_dir: Path, step: int, fault: Exception | None = None, keep: int = 2) -> Path:
    saved = Saved(checkpoint.tag(step), Position(step), world_size=1, fingerprint={})
    trained: Any = Trained()
    with patched_disk(fault):
        saving.save(trained, None, run_dir, saved, keep)
    return checkpoint.folder(run_dir) / saved.tag


def steps(run_dir: Path) -> list[str]:
    return sorted(path.name for path in checkpoint.folder(run_dir).iterdir())


def test_the_last_k_are_kept(tmp_path: Path) -> None:
    for step in range(1, 6):
        write(tmp_path, step, keep=3)
    assert steps(tmp_path) == [checkpoint.tag(step) for step in (3, 4, 5)]


@pytest.mark.parametrize("keep", [1, 2])
def test_damaged_checkpoints_of_later_steps_cost_no_new_one(tmp_path: Path, keep: int) -> None:
    """They are complete by their marks, and counted as the newest: each new checkpoint was deleted at once."""
    for step in (6, 8):
        file = write(tmp_path, step) / RANK
        file.write_bytes(file.read_bytes()[:-1])
    for step in (2, 4, 6, 8, 10):
        write(tmp_path, step, keep=keep)
        saved = checkpoint.newest(tmp_path)
        assert saved is not None
        assert saved.position.step == step
    assert steps(tmp_path) == [checkpoint.tag(step) for step in (8, 10)[-keep:]]


def test_damaged_checkpoints_of_earlier_steps_are_not_kept_instead_of_whole_ones(tmp_path: Path) -> None:
    write(tmp_path, 2)
    file = write(tmp_path, 3) / RANK
    file.write_bytes(file.read_bytes()[:-1])
    write(tmp_path, 4, keep=2)
    assert steps(tmp_path) == [checkpoint.tag(step) for step in (2, 3, 4)]


def damaged(path: Path) -> None:
    (path / RANK).write_bytes((path / RANK).read_bytes()[:-1])


DAMAGE: dict[str, Callable[[Path], object]] = {
    "a shorter file": damaged,
    "a lost file": lambda path: (path / RANK).unlink(),
    "a lost mark": lambda path: (path / checkpoint.MARK).unlink(),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_run_of_damaged_checkpoints_alone_does_not_begin_again_in_silence(tmp_path: Path, damage: str) -> None:
    assert checkpoint.to_resume(tmp_path) is None
    for folder in [write(tmp_path, step) for step in (2, 4)]:
        DAMAGE[damage](folder)
    with pytest.raises(UserError, match=r"step00000004 is damaged, and so are all 2 .* delete .*checkpoints to begin"):
        checkpoint.to_resume(tmp_path)
    shutil.rmtree(checkpoint.folder(tmp_path))
    assert checkpoint.to_resume(tmp_path) is None


@pytest.mark.parametrize("fault", [OSError(28, "No space left on device"), SafetensorError("file write failed")])
def test_a_save_that_fails_is_one_line_and_harms_nothing(tmp_path: Path, fault: Exception) -> None:
    before = {path: path.read_bytes() for path in write(tmp_path, 1).iterdir()}
    with pytest.raises(UserError, match=r"could not be written to .*checkpoints .*MB free.* resume=auto"):
        write(tmp_path, 2, fault)
    assert steps(tmp_path) == [checkpoint.tag(1)], "what was written aside does not go on filling the disk"
    assert {path: path.read_bytes() for path in before} == before
    saved = checkpoint.newest(tmp_path)
    assert saved is not None
    assert saved.position.step == 1


def on_a_full_disk(run_dir: Path, after: int, room: int) -> tuple[bool, UserError | None]:
    """Return if a save has a moment of that number, and the save's message."""
    with full_disk(run_dir, after, room) as disk:
        try:
            write(run_dir, 2)
        except UserError as error:
            return disk.full, error
    return disk.full, None


@pytest.mark.parametrize("room", [0, 300])  # limit in bytes of a file: no file can be written, or only small ones
def test_a_disk_that_is_full_from_any_moment_of_a_save(tmp_path: Path, room: int) -> None:
    """One line; the checkpoint before stays whole, no partial file stays, and with space the save succeeds."""
    write(tmp_path, 1)
    said = []
    for after in count():
        full, error = on_a_full_disk(tmp_path, after, room)
        found = checkpoint.newest(tmp_path)
        assert found is not None
        assert found.position.step == (1 if error else 2)
        saving.verify(checkpoint.folder(tmp_path) / found.tag, found, 0, 1)
        assert not (checkpoint.folder(tmp_path) / saving.PART).exists()
        if not full:
            break
        said.append(str(error))
        shutil.rmtree(checkpoint.folder(tmp_path) / checkpoint.tag(2), ignore_errors=True)
    assert len(said) > 10
    assert sum("free some space" in line and "resume=auto" in line for line in said) > 5
    assert steps(tmp_path) == [checkpoint.tag(1), checkpoint.tag(2)]


def test_a_lost_rank_is_not_called_a_full_disk(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="by peer"):
        write(tmp_path, 1, RuntimeError("Connection closed by peer [127.0.0.1]"))


def test_what_a_killed_save_left_goes_with_the_next(tmp_path: Path) -> None:
    aside = checkpoint.folder(tmp_path) / saving.PART / checkpoint.tag(1)
    aside.mkdir(parents=True)
    (aside / RANK).write_bytes(b"half")
    assert checkpoint.newest(tmp_path) is None
    write(tmp_path, 2)
    assert steps(tmp_path) == [checkpoint.tag(2)]


def test_what_a_killed_deletion_left_goes_with_the_next_save(tmp_path: Path) -> None:
    write(tmp_path, 1)
    (checkpoint.folder(tmp_path) / checkpoint.tag(1) / checkpoint.MARK).unlink()
    write(tmp_path, 2)
    assert steps(tmp_path) == [checkpoint.tag(2)]


def test_a_damaged_folder_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    file = write(tmp_path, 1) / RANK
    file.write_bytes(file.read_bytes()[:-1])
    assert checkpoint.newest(tmp_path) is None
    write(tmp_path, 1)
    assert steps(tmp_path) == [checkpoint.tag(1)]
    assert checkpoint.newest(tmp_path) is not None


def test_one_flipped_bit_is_found_before_it_is_loaded(tmp_path: Path) -> None:
    file = write(tmp_path, 1) / RANK
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(bytes(content))
    saved = checkpoint.newest(tmp_path)
    assert saved is not None, "its size is right"
    with pytest.raises(UserError, match=f"{saved.tag} cannot be loaded .*is damaged.*delete it"):
        saving.load(Trained(), None, tmp_path, saved)  # type: ignore[arg-type]


def test_ranks_share_the_reading(tmp_path: Path) -> None:
    """Exactly one of three ranks reads each file."""
    names = [states.rank_file(rank) for rank in range(5)]
    for name in names:
        (tmp_path / name).write_text(name)
    digests = {name: sha256(tmp_path / name) for name in names}
    saved = Saved("step1", Position(1), 5, {}, dict.fromkeys(names, 22), digests)
    for broken in names:
        (tmp_path / broken).write_text("x" * 22)
        found = 0
        for rank in range(3):
            try:
                saving.verify(tmp_path, saved, rank, 3)
            except UserError:
                found += 1
        (tmp_path / broken).write_text(broken)
        assert found == 1


@pytest.mark.parametrize("measured", ["eval_images", "certified_images"])
def test_what_is_measured_again_is_written_once(tmp_path: Path, measured: str) -> None:
    """A run that resumes at an epoch's end evaluates it again, because its checkpoint came first.

    Objectives may write `clean_acc` of the training's own images.
    """
    lines: list[dict[str, float]] = [{"step": 3, "clean_acc": 1.0}, {"step": 3, measured: 9}, {"step": 4, "loss": 0.9}]
    (tmp_path / ROWS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    with Report(tmp_path, total_steps=9, enabled=True).shown(first_step=3) as report:
        report.row(3, 0, {measured: 9})
    written = [json.loads(line) for line in (tmp_path / ROWS).read_text().splitlines()]
    assert written[0] == lines[0]
    assert [row | {"time": 0} for row in written[1:]] == [{"step": 3, "epoch": 0, "time": 0, measured: 9}]


def test_lines_tell_when_the_end_comes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Report(tmp_path, total_steps=30, enabled=True).shown(first_step=10) as report:
        report._began = (time.monotonic() - 20, 10)
        report.row(20, 1, {"loss": 1.0, "images_per_s": 5.0})
    assert "step 20/30  epoch 2  loss 1  images_per_s 5  eta 0:00:20" in capsys.readouterr().out


def test_the_time_that_steps_wait_for_images_is_told(tmp_path: Path) -> None:
    def slow() -> Iterator[int]:
        for number in range(4):
            time.sleep(0.05)
            yield number

    report = Report(tmp_path, total_steps=9, enabled=True)
    numbers = []
    for number in report.awaited(slow()):
        time.sleep(0.05)
        numbers.append(number)
    assert numbers == [0, 1, 2, 3]
    pace = report.pace(4, 8)
    assert 0.3 < pace["loader_wait"] < 0.7
    assert 20 < pace["images_per_s"] < 81
    assert report.pace(5, 8)["loader_wait"] == 0


def test_a_row_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / ROWS).symlink_to("/dev/full")
    with pytest.raises(UserError, match=r"metrics.jsonl could not be written \(No space left on device\)"):
        Report(tmp_path, total_steps=9, enabled=True).row(1, 0, {"loss": 1.0})


LOGGED = """
import logging
from pathlib import Path
from trainers.engine import logs
logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
logs.to_files(Path("."))
logging.getLogger("trainers.steps.loop").info("a step")
logging.getLogger("certizoo.shards.read").warning("a corrupt image")
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_other_ranks_warn_in_their_files(tmp_path: Path, rank: int) -> None:
    place = f"import os; os.environ.update(RANK='{rank}', LOCAL_RANK='{rank}', WORLD_SIZE='2')\n"
    done = python(place + LOGGED, tmp_path)
    assert done.returncode == 0, done.stderr
    assert ("a corrupt image" in done.stderr) == (rank == 0)
    text = (tmp_path / "logs" / f"rank{rank}.log").read_text()
    assert "INFO trainers.steps.loop: a step" in text
    assert "WARNING certizoo.shards.read: a corrupt image" in text


def test_positions_count_epochs() -> None:
    position, seen = Position(), []
    for _ in range(6):
        position = position.after_step(steps_per_epoch=3)
        seen.append((position.step, position.epoch, position.batch_in_epoch, position.ends_epoch))
    assert seen == [(1, 0, 1, False), (2, 0, 2, False), (3, 1, 0, True), (4, 1, 1, False), (5, 1, 2, False),
                    (6, 2, 0, True)]  # fmt: skip
    assert json.loads(json.dumps(vars(position))) == {"step": 6, "epoch": 2, "batch_in_epoch": 0, "before": []}


@pytest.mark.parametrize(
    ("every", "epochs", "wanted"),
    [(0, 1, [3, 6, 9, 11]), (0, 2, [6, 11]), (4, 2, [4, 6, 8, 11]), (0, 9, [11]), (2, 1, [2, 3, 4, 6, 8, 9, 10, 11])],
)
def test_checkpoints_are_due_by_steps_by_epochs_and_at_the_end(every: int, epochs: int, wanted: list[int]) -> None:
    train, position, due = TrainConfig(2, 8, checkpoint_every=every, checkpoint_epochs=epochs), Position(), []
    for _ in range(11):
        position = position.after_step(steps_per_epoch=3)
        if checkpoint_due(train, position, total_steps=11):
            due.append(position.step)
    assert due == wanted
