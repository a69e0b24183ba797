"""Where results go: benchmarks/results/NAME.json, with the hardware, the command and the commit that made them."""

import json
import os
import platform
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from certizoo.commit import git_commit

RESULTS = Path(__file__).parent / "results"


def hardware() -> str:
    """'NVIDIA H200' or '2 cores, x86_64 CPU'."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"CPU, {os.cpu_count()} cores, {platform.machine()}"


def circumstances() -> dict[str, Any]:
    """How a result was made."""
    return {
        "command": " ".join(["python", *sys.orig_argv[1:]]),
        "commit": git_commit(),
        "hardware": hardware(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "date": datetime.now(UTC).date().isoformat(),
    }


def write(name: str, entry: dict[str, Any]) -> None:
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(entry, indent=2) + "\n")


def record(name: str, result: dict[str, Any]) -> None:
    """Write the result and show it."""
    entry = circumstances() | result
    write(name, entry)
    sys.stdout.write(f"{name}: {json.dumps(entry)}\n")
