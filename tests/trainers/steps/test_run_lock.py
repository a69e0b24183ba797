"""One trainer at a time uses a run folder, and a second one is refused at once."""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from certizoo import UserError
from certizoo.locks import HOLDER, LOCK
from tests.tools.launching import ROOT, TINY, finish, launch, ranks, reach, rows
from tests.tools.trained import Alone
from trainers import ranks as of_launcher
from trainers.job.folder import refuse_used_folder
from trainers.steps.run_lock import run_lock

SCRIPT = ROOT / "trainers" / "adv_train.py"
HOLD = """
import sys, time
from pathlib import Path
from trainers.job.folder import held
with held(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def another(run_dir: Path) -> "subprocess.Popen[str]":
    """Start a process that holds the folder."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, run_dir], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


class Second(Alone):
    """The second of two ranks, whose first rank failed or managed to take the folder."""

    rank, size = 1, 2

    def __init__(self, refused: bool) -> None:
        self.refused = refused

    def sums(self, values: Any) -> Any:
        return values + float(self.refused)


def enter(run_dir: Path, world: Any, unchanged: Any = lambda: None) -> list[str]:
    """Return the names in the folder while it is held."""
    with run_lock(run_dir, world, unchanged):
        return sorted(path.name for path in run_dir.iterdir()) if run_dir.is_dir() else []


def test_a_second_run_is_refused_at_once_and_a_killed_one_holds_no_lock(tmp_path: Path) -> None:
    process = another(tmp_path / "run")
    since = time.monotonic()
    with pytest.raises(
        UserError, match=rf"another process writes a training here \(process {process.pid} .*name=ANOTHER"
    ):
        enter(tmp_path / "run", Alone())
    assert time.monotonic() - since < 2
    process.kill()
    process.wait()
    assert enter(tmp_path / "run", Alone()) == [LOCK, HOLDER]


def test_a_folder_that_changed_meanwhile_is_refused(tmp_path: Path) -> None:
    def unchanged() -> None:
        raise UserError("it was written in")

    with pytest.raises(UserError, match="it was written in"):
        enter(tmp_path / "run", Alone(), unchanged)
    enter(tmp_path / "run", Alone())  # it is free again


def test_other_ranks_end_without_a_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_launcher, "GRACE_SECONDS", 0.0)
    with pytest.raises(SystemExit) as caught:
        enter(tmp_path / "run", Second(refused=True))
    assert caught.value.code == 2
    assert enter(tmp_path / "run", Second(refused=False)) == [], "it is rank 0 that holds the folder"


def test_what_the_lock_leaves_is_no_earlier_run(tmp_path: Path) -> None:
    enter(tmp_path, Alone())
    refuse_used_folder(tmp_path, None)
    (tmp_path / "config.yaml").touch()
    with pytest.raises(UserError, match="resume=auto"):
        refuse_used_folder(tmp_path, None)


@pytest.mark.slow
def test_a_second_command_ends_and_after_a_kill_the_next_goes_on(folder: Path) -> None:
    """Two ranks each. The first command's rank 0 is killed, and the third starts while its launcher ends."""
    run = (*TINY, "train.epochs=1000", "train.log_every=1", "train.checkpoint_every=4", "train.eval_images=0",
           "data.workers=1", "name=twice")  # fmt: skip
    run_dir = folder / "runs" / "twice"
    first = launch(SCRIPT, *run, cwd=folder)
    reach(first, run_dir, 5)
    status, output = finish(launch(SCRIPT, *run, "resume=auto", cwd=folder), seconds=60)
    assert status == 2, output
    (error,) = [line for line in output.splitlines() if line.startswith("error: ")]
    assert "another process writes a training here" in error
    assert "Traceback" not in output
    step = max(row["step"] for row in rows(run_dir))
    reach(first, run_dir, int(step) + 2)  # the first command is unaffected
    ranks(first, SCRIPT)[0].kill()
    third = launch(SCRIPT, *run, "resume=auto", cwd=folder)
    status, output = finish(first, seconds=60)
    assert status != 0
    # Rank 1 reports it, unless the launcher, which checks once a second, ends it first.
    assert "rank 0 was killed (SIGKILL): out of memory?" in output or "return code = -9" in output, output
    reach(third, run_dir, int(step) + 8)
    third.terminate()
    ranks(third, SCRIPT)[0].terminate()
    assert "resuming" in finish(third, seconds=60)[1]
