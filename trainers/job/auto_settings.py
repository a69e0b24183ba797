"""Settings that depend on the machine, and the learning rate of the batch, resolved once before training.

    train.batch_size  null       what a rank's device can hold at 224 pixels, times the ranks
    train.precision   auto       bf16 on a GPU that supports it, else fp32
    train.compile     auto       true on a GPU with a compiler, if the options can be compiled
    data.workers      a number   at most the number of cores
    optimizer.lr      a number   given for optimizer.lr_batch images, scaled to the run's batch

The resolved configuration is written to the run folder, the checkpoints and the hand-over; resolving it again changes
nothing. A resumed run keeps the values of its first start, on any machine.
"""

import importlib.util
import os
import shutil
from collections.abc import Mapping
from typing import Any

import torch

from certizoo.shards.streams import cores
from trainers.job.checkpoint import Saved
from trainers.objectives import SECOND_ORDER
from trainers.settings import OptimizerConfig

AUTO = "auto"
IMAGES_A_GPU, IMAGES_A_CPU_RANK = 128, 8
COMPILERS = ("cc", "gcc", "clang")

Config = dict[str, Any]


def resolve_auto(config: Config, ranks: int, saved: Saved | None) -> tuple[Config, list[str]]:
    """Return the configuration and a line for each key that it sets: "train.precision=bf16"."""
    found = machine_settings(config, ranks)
    before = saved.fingerprint if saved else {}
    found = {key: before.get(key, value) for key, value in found.items()}
    workers, then = config["data"].get("workers"), before.get("data.workers")
    if isinstance(workers, int):
        most = then if isinstance(then, int) else cores()
        found |= {"data.workers": most} if workers > most else {}
    config = with_keys(config, found)
    lines = [f"{key}={str(value).lower()}" for key, value in found.items()]
    return config, lines


def machine_settings(config: Config, ranks: int) -> dict[str, Any]:
    """Return the keys that are left to the machine, with their values on this one."""
    train = config["train"]
    found: dict[str, Any] = {}
    exact = bool(train["sam_rho"]) or config["objective"]["name"] in SECOND_ORDER
    if train["batch_size"] is None:
        found["train.batch_size"] = ranks * (IMAGES_A_GPU if torch.cuda.is_available() else IMAGES_A_CPU_RANK)
    if train["precision"] == AUTO:
        found["train.precision"] = "bf16" if has_fast_bf16() and not exact else "fp32"
    if train["compile"] == AUTO:
        plain = not (exact or train["grad_checkpointing"] or config["masks"]["ard"])
        found["train.compile"] = plain and can_compile()
    return found


def has_fast_bf16() -> bool:
    """Return True if bfloat16 saves time on this machine."""
    return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)


def bf16_is_emulated(config: Config) -> bool:
    """Return True if the configuration asks for bfloat16 on a CPU that computes it in software.

    There, a step of cert_gpsa_vit_c10 took more than five times as long as in fp32.
    """
    cpu: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # missing in older versions of torch
    without = cpu.get("architecture") == "x86_64" and not (cpu.get("avx512_bw") or cpu.get("amx_bf16"))
    return config["train"]["precision"] == "bf16" and without and not torch.cuda.is_available()


def can_compile() -> bool:
    """Return True with a GPU and the tools that `torch.compile` builds its kernels with."""
    compiler = os.environ.get("CC") or next(filter(shutil.which, COMPILERS), None)
    return torch.cuda.is_available() and compiler is not None and importlib.util.find_spec("triton") is not None


def scale_lr(config: Config, optimizer: OptimizerConfig, batch_size: int) -> tuple[Config, OptimizerConfig, list[str]]:
    """Scale the learning rate to this batch; also return the line that reports it."""
    own = optimizer.for_batch(batch_size)
    if own == optimizer:
        return config, optimizer, []
    config = with_keys(config, {"optimizer.lr": own.lr, "optimizer.lr_batch": batch_size})
    line = f"optimizer.lr={own.lr:.4g} for batch {batch_size} ({optimizer.lr:.4g} for {optimizer.lr_batch}"
    return config, own, [f"{line}, {optimizer.lr_scaling} scaling)"]


def with_keys(config: Config, values: Mapping[str, Any]) -> Config:
    """Return the configuration with {"group.key": value} set."""
    for name, value in values.items():
        group, key = name.split(".")
        config = {**config, group: {**config[group], key: value}}
    return config
