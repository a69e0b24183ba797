"""The real DeepSpeed launcher on 2 CPU ranks, for the trainers' tests."""

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# A ViT of 30 thousand parameters without caps, with drop-path: enough to need every kind of random stream.
TINY = (
    "+model=dp_vit_ti", "+model.embed_dim=32", "+model.depth=2", "+model.num_heads=2", "+model.patch_size=4",
    "+model.global_pool=avg", "+model.drop_path_rate=0.2", "data=digits", "attack=pgd_l2", "attack.eps=0.2",
    "attack.steps=2", "penalty=msvp", "optimizer.lr=3e-3", "schedule.warmup_epochs=0.5", "train.batch_size=64",
    "registry.enabled=false", "certify.enabled=false",
)  # fmt: skip


def environment() -> dict[str, str]:
    """CPU ranks with one thread each; nothing of a surrounding process group."""
    hidden = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}
    kept = {key: value for key, value in os.environ.items() if key not in hidden}
    return kept | {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "LOCAL_SIZE": "2"}


def launch(script: Path, *arguments: str, cwd: Path) -> "subprocess.Popen[str]":
    """`deepspeed SCRIPT ARGUMENTS` with 2 ranks; stdout and stderr in one pipe."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    deepspeed = Path(sys.executable).parent / "deepspeed"
    command = [sys.executable, str(deepspeed), f"--master_port={port}", str(script), *arguments]
    return subprocess.Popen(
        command, cwd=cwd, env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def finish(process: "subprocess.Popen[str]", seconds: float = 150) -> tuple[int, str]:
    """(exit status, output); the process is ended if it takes longer."""
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.terminate()
        output, _ = process.communicate()
        raise AssertionError(f"still running after {seconds} s:\n{output}") from None
    return process.returncode, output
