"""Write results to benchmarks/results/NAME.json, with hardware, command and commit."""

import json
import os
import platform
import re
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from certizoo.commit import git_commit

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
MODEL_NAME = re.compile(r"^model name\s*: (\S.*)$", re.MULTILINE)


def hardware() -> str:
    """Return 'NVIDIA H200' or 'CPU, 2 cores, Intel(R) Xeon(R) Processor'."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"CPU, {os.cpu_count()} cores, {_processor()}"


def _processor() -> str:
    """Return the processor's name on Linux, elsewhere its architecture."""
    told = Path("/proc/cpuinfo")
    named = MODEL_NAME.search(told.read_text()) if told.is_file() else None
    return named[1] if named else platform.machine()


def circumstances() -> dict[str, Any]:
    """Return how a result was made."""
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
    """Write the result and print it."""
    entry = circumstances() | result
    write(name, entry)
    sys.stdout.write(f"{name}: {json.dumps(entry)}\n")
