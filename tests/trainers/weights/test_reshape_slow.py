"""A run of two ranks continues on one rank without loss."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools.launching import ROOT, TINY, environment, finish, launch, rows
from trainers import reshape
from trainers.job import checkpoint
from trainers.job.checkpoint import MARK

pytestmark = pytest.mark.slow

SCRIPT = ROOT / "trainers" / "adv_train.py"
STEPS_PER_EPOCH = 22  # 45 micro-batches of 16 on each of 2 ranks, 2 of them a step
RUN = (*TINY, "train.epochs=2", "train.log_every=1", "train.eval_images=64", "train.micro_batch_size=16",
       "train.keep_checkpoints=9", "train.checkpoint_every=10")  # fmt: skip


@pytest.fixture(scope="module", params=[0, 1, 2, 3], ids="zero{}".format)
def calm(
    request: pytest.FixtureRequest, digits: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[str]]:
    """Run the training on two ranks without a break; return its command too."""
    folder = tmp_path_factory.mktemp("reshape")
    shutil.copytree(digits, folder / "data" / "digits")
    average = 0.0 if request.param == 3 else 0.9  # it needs whole weights
    command = [*RUN, f"deepspeed=zero{request.param}", f"train.ema_decay={average}"]
    status, output = finish(launch(SCRIPT, *command, "name=calm", cwd=folder))
    assert status == 0, output
    return folder / "runs" / "calm", command


def half(calm: Path, name: str) -> Path:
    """Return a copy of the run as of step 30: past the first epoch, inside the second."""
    run_dir = calm.with_name(name)
    shutil.copytree(calm, run_dir)
    for made_later in ("handover", "pictures"):
        shutil.rmtree(run_dir / made_later)
    for path in checkpoint.folders(run_dir):
        if int(path.name.removeprefix("step")) > 30:
            shutil.rmtree(path)
    return run_dir


def accuracies(run_dir: Path) -> dict[float, float]:
    return {row["step"]: row["clean_acc"] for row in rows(run_dir) if "clean_acc" in row}


def test_two_ranks_to_one_and_to_two(calm: tuple[Path, list[str]]) -> None:
    whole, command = calm
    for name, ranks in (("two", 2), ("one", 1)):
        run_dir = half(whole, name)
        reshape.main([str(run_dir)])
        saved = checkpoint.newest(run_dir)
        assert saved is not None
        assert saved.position.step == STEPS_PER_EPOCH
        assert saved.world_size is None
        kept = {path.parent.name for path in (run_dir / "checkpoints" / "other_ranks").glob(f"*/{MARK}")}
        assert kept == {"step00000030"}, "nothing is deleted"
        more = [*command, f"name={name}", "resume=auto"]
        if ranks == 2:
            status, output = finish(launch(SCRIPT, *more, cwd=run_dir.parents[1]))
        else:
            done = subprocess.run(
                [sys.executable, str(SCRIPT), *more],
                cwd=run_dir.parents[1], env=environment(), text=True, capture_output=True, timeout=300,
            )  # fmt: skip
            status, output = done.returncode, done.stdout + done.stderr
        assert status == 0, output
        assert f"at step {STEPS_PER_EPOCH}" in output
        clean = [accuracies(path) for path in (whole, run_dir)]
        assert clean[0][STEPS_PER_EPOCH] == clean[1][STEPS_PER_EPOCH], "the same model, measured again"
        if ranks == 2:
            losses = [[row["loss"] for row in rows(path) if "loss" in row] for path in (whole, run_dir)]
            assert losses[0] == losses[1], "optimiser, schedule and streams as in the undisturbed run"
