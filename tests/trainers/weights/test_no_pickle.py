"""Whole trainings in processes that end as soon as anything begins to read a pickle: we, DeepSpeed or torch."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools.launching import ROOT, TINY, environment, finish, launch

SCRIPT = ROOT / "trainers" / "adv_train.py"
STATUS = 77  # the guard's exit status
GUARD = {"PYTHONPATH": f"{ROOT / 'tests' / 'tools' / 'guard'}{os.pathsep}{ROOT}"}
READERS = {
    "pickle": "pickle.loads(pickle.dumps(1))",
    "file": "pickle.load(open('x', 'rb'))",
    "of python": "pickle._Unpickler(open('x', 'rb')).load()",
    "unpickler": "pickle.Unpickler(open('x', 'rb')).load()",
    "torch": "torch.load('x', weights_only=False)",
    "collective": "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1); "
    "dist.all_gather_object([None], 1)",
}


EACH = """
import json, os, pickle, sys, torch, torch.distributed as dist
torch.save([1], 'x')
for code in json.loads(sys.argv[1]):
    if not (child := os.fork()):
        exec(code)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def test_the_guard_sees_every_reader(tmp_path: Path) -> None:
    """Each reader runs in a process of its own, forked from one that has loaded torch."""
    done = subprocess.run(
        [sys.executable, "-c", EACH, json.dumps([*READERS.values()])], cwd=tmp_path, env=environment() | GUARD,
        timeout=60, text=True, capture_output=True,
    )  # fmt: skip
    assert dict(zip(READERS, done.stdout.split(), strict=True)) == dict.fromkeys(READERS, str(STATUS)), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_nothing_reads_a_pickle(folder: Path, stage: int) -> None:
    """Two ranks run from the start to the hand-over, and again from the checkpoint.

    Loaders run in the ranks' own processes, because worker processes exchange pickles within one start.
    """
    run = (*TINY, f"deepspeed=zero{stage}", "train.max_steps=3", "train.eval_images=64", "data.workers=0",
           "++deepspeed.persistent_below=0", f"name=zero{stage}")  # fmt: skip
    status, output = finish(launch(SCRIPT, *run, cwd=folder, more=GUARD))
    assert status == 0, output
    run_dir = folder / "runs" / f"zero{stage}"
    weights = (run_dir / "handover" / "model.safetensors").read_bytes()
    shutil.rmtree(run_dir / "handover")
    status, output = finish(launch(SCRIPT, *run, "resume=auto", cwd=folder, more=GUARD))
    assert status == 0, output
    assert "at step 3" in output
    assert (run_dir / "handover" / "model.safetensors").read_bytes() == weights
