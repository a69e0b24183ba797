"""The real DeepSpeed launcher on 2 CPU ranks, for the trainers' tests."""

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from certizoo.ports import free_port

ROOT = Path(__file__).resolve().parents[2]

# A ViT of 30 thousand parameters without caps, with drop-path: enough to need every kind of random stream.
TINY = (
    "+model=dp_vit_ti", "+model.embed_dim=32", "+model.depth=2", "+model.num_heads=2", "+model.patch_size=4",
    "+model.global_pool=avg", "+model.drop_path_rate=0.2", "data=digits", "attack=pgd_l2", "attack.eps=0.2",
    "attack.steps=2", "penalty=msvp", "optimizer.lr=3e-3", "optimizer.lr_batch=null",
    "schedule.warmup_epochs=0.5", "train.batch_size=64", "registry.enabled=false", "certify.enabled=false",
)  # fmt: skip


def environment() -> dict[str, str]:
    """Return an environment for CPU ranks with one thread each, outside any process group."""
    hidden = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}
    kept = {key: value for key, value in os.environ.items() if key not in hidden}
    return kept | {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "LOCAL_SIZE": "2"}


def launch(script: Path, *arguments: str, cwd: Path, more: Mapping[str, str] | None = None) -> "subprocess.Popen[str]":
    """Run `deepspeed SCRIPT ARGUMENTS` with 2 ranks, stdout and stderr in one pipe, `more` in the environment."""
    deepspeed = Path(sys.executable).parent / "deepspeed"
    command = [sys.executable, str(deepspeed), f"--master_port={free_port()}", str(script), *arguments]
    return subprocess.Popen(
        command, cwd=cwd, env=environment() | dict(more or {}), text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, pipesize=2**20,  # a test that waits for rows does not drain the pipe
    )  # fmt: skip


def run_ranks(worker: Path, *arguments: str, cwd: Path, seconds: float = 300) -> None:
    """Run a worker on 2 ranks without the launcher, whose own processes take longer to start than a short test runs.

    Raises AssertionError with the output of a rank that fails or takes longer.
    """
    group = environment() | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    logs = [cwd / f"{worker.stem}-rank{rank}.log" for rank in range(2)]
    started = []
    for rank, log in enumerate(logs):
        own = group | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        with log.open("w") as output:
            started.append(
                subprocess.Popen(
                    [sys.executable, str(worker), *arguments], cwd=cwd, env=own, stdout=output, stderr=subprocess.STDOUT
                )
            )
    end = time.monotonic() + seconds
    try:
        statuses = [process.wait(max(0.0, end - time.monotonic())) for process in started]
    except subprocess.TimeoutExpired:
        statuses = [1]
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert not any(statuses), "\n".join(log.read_text() for log in logs)


def finish(process: "subprocess.Popen[str]", seconds: float = 300) -> tuple[int, str]:
    """Return (exit status, output); terminate the process if it takes longer."""
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.terminate()
        output, _ = process.communicate()
        raise AssertionError(f"still running after {seconds} s:\n{output}") from None
    return process.returncode, output


def rows(run_dir: Path) -> list[dict[str, float]]:
    """Return the complete lines of metrics.jsonl."""
    path = run_dir / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def reach(process: "subprocess.Popen[str]", run_dir: Path, step: int, seconds: float = 300) -> None:
    """Wait until the run has made a step."""
    end = time.monotonic() + seconds
    while not any(row["step"] >= step for row in rows(run_dir)):
        if process.poll() is not None or time.monotonic() > end:
            process.kill()
            raise AssertionError(f"step {step} was not reached:\n{process.communicate()[0]}")
        time.sleep(0.02)


def ranks(process: "subprocess.Popen[str]", script: Path) -> dict[int, psutil.Process]:
    """Return the processes of a launched script by rank, without their loaders."""
    found: dict[int, psutil.Process] = {}
    for child in psutil.Process(process.pid).children(recursive=True):
        if str(script) in child.cmdline() and "RANK" in child.environ():
            found.setdefault(int(child.environ()["RANK"]), child)  # parents come first
    return found


def wait_for(url: str, server: "subprocess.Popen[str]", seconds: float = 200) -> None:
    for _ in range(int(seconds * 5)):
        with suppress(OSError), urllib.request.urlopen(url, timeout=2) as answer:
            if answer.status == 200:
                return
        assert server.poll() is None, "the server ended"
        time.sleep(0.2)
    raise AssertionError(f"{url} did not come up")
