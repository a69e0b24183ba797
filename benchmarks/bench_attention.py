"""Cost of each attention variant relative to dot-product attention in the same run.

It times forward and backward of one ViT-B block (width 768, 12 heads, batch 8, 197 tokens), float32 on a CPU, bf16 on a
GPU. Blocks alternate step by step, so that a machine whose speed drifts slows all of them; the ratio is taken turn by
turn. Peak memory is that of a fresh process per variant, above what it held before the block was created. `msvp` is
dot-product attention with the penalty of the block's W_Q, W_K, W_V.

    python -m benchmarks.bench_attention [--turns 40]
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import nn

import zoo
from benchmarks import timing
from benchmarks.record import record
from zoo.attention import variants
from zoo.layers.block import PreNormBlock
from zoo.layers.init import trunc_normal_init_
from zoo.layers.mlp import Mlp

WIDTH, HEADS, BATCH, TOKENS = 768, 12, 8, 197
TARGETS = {"dp": 1.0, "l2": 1.15, "scsa": 1.15, "ln": 1.15, "msvp": 1.03}  # of the time; memory 1.2
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
REPEATS = {"cpu": 1, "cuda": 20}[DEVICE]  # steps per measurement: a GPU takes under a millisecond for one


def make_step(name: str) -> Callable[[], None]:
    """Return a function that runs forward and backward of a fresh block."""
    torch.manual_seed(0)
    attention = variants()["dp" if name == "msvp" else name](WIDTH, HEADS)
    norm = partial(nn.LayerNorm, WIDTH, eps=1e-6)
    block = PreNormBlock(attention, Mlp(WIDTH, 4 * WIDTH), norm(), norm())
    trunc_normal_init_(block)
    dtype = torch.float32 if DEVICE == "cpu" else torch.bfloat16
    block.to(DEVICE, dtype)
    x_BND = torch.randn(BATCH, TOKENS, WIDTH, device=DEVICE, dtype=dtype, requires_grad=True)

    def step() -> None:
        block.zero_grad()
        x_BND.grad = None
        loss = block(x_BND).square().mean()
        if name == "msvp":
            loss = loss + zoo.penalty.msvp(block, 1e-4, 1e-4, 1e-4)
        loss.backward()

    return step


def repeated(step: Callable[[], None]) -> None:
    for _ in range(REPEATS):
        step()


def peak_bytes(name: str) -> int:
    """Return the peak memory of two steps in this process."""
    if DEVICE == "cuda":
        step = make_step(name)
        step(), step()
        return torch.cuda.max_memory_allocated()
    before = resident_bytes("VmRSS")
    step = make_step(name)
    step(), step()
    return resident_bytes("VmHWM") - before  # not getrusage, whose maximum starts with that of the parent


def resident_bytes(field: str) -> int:
    """Return VmRSS (now) or VmHWM (the peak) of this process on Linux."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


def peak_in_new_process(name: str) -> int:
    # Every tensor is returned to the system at once, so that the peak is that of live tensors.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-m", "benchmarks.bench_attention", "--peak", name]
    return int(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)


def quartiles(values: list[float]) -> list[float]:
    return [round(value, 4) for value in statistics.quantiles(values, n=4)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--peak", metavar="NAME", help="print the peak memory of one variant in bytes and stop")
    options = parser.parse_args()
    if options.peak:
        sys.stdout.write(f"{peak_bytes(options.peak)}\n")
        return
    steps = {name: make_step(name) for name in TARGETS}
    for step in steps.values():
        step()
    calls = {name: partial(repeated, step) for name, step in steps.items()}
    # Dot-product attention is timed next to each variant, before and after it in turn.
    ratios: dict[str, list[float]] = {name: [] for name in TARGETS if name != "dp"}
    times: dict[str, list[float]] = {name: [] for name in TARGETS}
    for turn in range(options.turns):
        for name, found in ratios.items():
            seconds = timing.pair(calls[name], calls["dp"], time.perf_counter, swap=turn % 2 == 1)
            found.append(seconds[0] / seconds[1])
            for key, value in zip((name, "dp"), seconds, strict=True):
                times[key].append(value / REPEATS)
    peaks = {name: peak_in_new_process(name) for name in TARGETS}
    record(
        f"attention_{DEVICE}",
        {
            "block": {"width": WIDTH, "heads": HEADS, "batch": BATCH, "tokens": TOKENS},
            "turns": options.turns,
            "seconds_dp": statistics.median(times["dp"]),
            "time_ratio_quartiles": {name: quartiles(found) for name, found in ratios.items()},
            "time_ratio_of_medians": {
                name: round(statistics.median(times[name]) / statistics.median(times["dp"]), 4) for name in ratios
            },
            "time_target": {name: target for name, target in TARGETS.items() if name != "dp"},
            "memory_ratio": {name: round(peaks[name] / peaks["dp"], 4) for name in ratios},
            "megabytes_dp": round(peaks["dp"] / 1e6),
        },
    )


if __name__ == "__main__":
    main()
