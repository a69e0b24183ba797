"""Twenty kills of one training, at random moments and of every kind, do not change its result."""

import random
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from tests.tools.launching import ROOT, TINY, finish, launch, ranks, rows
from trainers.job import checkpoint
from trainers.weights import saving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

SCRIPT = ROOT / "trainers" / "adv_train.py"
SEED, KILLS, STEPS = 17, 20, 600
RUN = (*TINY, f"train.max_steps={STEPS}", "train.epochs=100", "train.log_every=1", "train.checkpoint_every=5",
       "train.eval_images=0", "data.workers=1", "++deepspeed.persistent_below=0")  # fmt: skip
Processes = list[psutil.Process]  # targets: the command, DeepSpeed's launcher, and the ranks that have started


KINDS: dict[str, tuple[int, Callable[[Processes], Processes]]] = {
    "kill rank 0": (signal.SIGKILL, lambda found: found[2:3]),
    "kill rank 1": (signal.SIGKILL, lambda found: found[3:4]),
    "kill the launcher": (signal.SIGKILL, lambda found: found[1:2]),
    "kill everything": (signal.SIGKILL, lambda found: found),
    "ask rank 1": (signal.SIGTERM, lambda found: found[3:4]),
    "ask the launcher": (signal.SIGTERM, lambda found: found[1:2]),
    "ask everything": (signal.SIGTERM, lambda found: found),
}


def tree(process: "subprocess.Popen[str]") -> Processes:
    with suppress(psutil.Error):
        command = psutil.Process(process.pid)
        return [command, *command.children(), *(each for _, each in sorted(ranks(process, SCRIPT).items()))]
    return []


def steps_of(run_dir: Path) -> int:
    return int(max((row["step"] for row in rows(run_dir)), default=0))


def disturbed(run_dir: Path, command: list[str], cwd: Path, chance: random.Random) -> str:
    """Start the run and end it at a random moment; return the action and its time."""
    before, kind, aim = steps_of(run_dir), chance.choice(list(KINDS)), chance.randrange(-4, 14)
    process = launch(SCRIPT, *command, cwd=cwd)
    if aim < 0:  # while it starts
        time.sleep(chance.uniform(1, 9))
    else:
        deadline = time.monotonic() + 120
        while steps_of(run_dir) < before + aim and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(chance.uniform(0, 0.2))
    assert process.poll() is None, process.communicate()[0]
    found = tree(process)
    signum, chosen = KINDS[kind]
    for target in chosen(found) or found:
        with suppress(psutil.Error):
            target.send_signal(signum)
    status, output = finish(process, seconds=120)
    _, alive = psutil.wait_procs(found, timeout=60)
    assert not alive, output
    # One of Python's threads prints this when a loader process is gone as it fetches a file descriptor.
    shown = output.count("Traceback") - output.count("resource_sharer.py")
    assert shown == 0 or (signum == signal.SIGTERM and aim < 0), output
    return f"{kind}, {'starting' if aim < 0 else 'training'}: steps {before} to {steps_of(run_dir)}, status {status}"


def kept(run_dir: Path) -> int:
    """Return the step from which the next start resumes, checking that its files are whole."""
    saved = checkpoint.newest(run_dir)
    if saved is None:
        return 0
    saving.verify(checkpoint.folder(run_dir) / saved.tag, saved, 0, 1)
    return saved.position.step


@pytest.mark.parametrize("stage", [1, 3])
def test_twenty_kills_leave_the_same_weights(folder: Path, stage: int) -> None:
    run = [*RUN, f"deepspeed=zero{stage}"]
    calm, run_dir = (folder / "runs" / f"{name}{stage}" for name in ("calm", "soaked"))
    status, output = finish(launch(SCRIPT, *run, f"name={calm.name}", cwd=folder))
    assert status == 0, output
    chance, began, step = random.Random(SEED + stage), time.monotonic(), 0
    for number in range(KILLS):
        told = disturbed(run_dir, [*run, f"name={run_dir.name}", "resume=auto"], folder, chance)
        print(f"seed {SEED + stage}, life {number + 1}: {told}", flush=True)
        assert kept(run_dir) >= step, "no checkpoint was lost"
        step = kept(run_dir)
    assert 0 < step < STEPS
    status, output = finish(launch(SCRIPT, *run, f"name={run_dir.name}", "resume=auto", cwd=folder))
    assert status == 0, output
    print(f"ZeRO {stage}: {KILLS} kills in {time.monotonic() - began:.0f} s, the last start went on from step {step}")
    weights = [(path / "handover" / "model.safetensors").read_bytes() for path in (calm, run_dir)]
    assert weights[0] == weights[1]
    losses = [[(row["step"], row["loss"]) for row in rows(path) if "loss" in row] for path in (calm, run_dir)]
    assert losses[0] == losses[1], "every step once"
    left = sorted(path.name for path in checkpoint.folder(run_dir).iterdir())
    assert left == sorted(path.name for path in checkpoint.folder(calm).iterdir()), "no half checkpoint"
