"""One training of a table: its command line, its run folder, and its accuracy under attack."""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Generator, nn

import zoo
from benchmarks.record import ROOT
from certizoo import UserError
from certizoo.attacks import AttackConfig
from certizoo.ports import free_port
from certizoo.shards import DataConfig, eval_loader, find

BATCH = 100
# CW-20 of Mo et al. 2022 is PGD that ascends the margin.
ATTACKS = {
    "CW-20": AttackConfig("linf", 8 / 255, 20, 2 / 255, loss="margin"),
    "PGD-20": AttackConfig("linf", 8 / 255, 20, 2 / 255, loss="ce"),
    "FGSM": AttackConfig("linf", 2 / 255, 1, 2 / 255, random_start=False),
    "PGD-2": AttackConfig("linf", 2 / 255, 2, 1 / 255, random_start=False),
}
Figures = dict[str, float]  # per cent, by column


@dataclass(frozen=True)
class Training:
    """A run: the command line that defines it, and the configuration that it composes."""

    options: tuple[str, ...]
    config: dict[str, Any]

    @property
    def folder(self) -> Path:
        return ROOT / self.config["run_dir"]


def portable(overrides: Sequence[str]) -> list[str]:
    """Return the overrides with SHARDS for the folder of this machine's data."""
    return ["data.root=SHARDS" if word.startswith("data.root=") else word for word in overrides]


def train(script: str, run: Training, to_file: bool) -> None:
    """Run one process, which does nothing if the run is complete and refuses other settings.

    Raises:
        UserError: it fails.
    """
    # Without the launcher, which would start the one process by two more.
    words = [sys.executable, str(ROOT / "trainers" / f"{script}.py"), *run.options, "resume=auto"]
    environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    log = run.folder.with_name(f"{run.folder.name}.log")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") if to_file else nullcontext() as out:
        ended = subprocess.run(words, cwd=ROOT, env=environment, stdout=out, stderr=out)
    if ended.returncode:
        said = log if to_file else "its output"
        raise UserError(f"{run.folder.name} did not finish; fix the error in {said} and run the command again")


def pace(folder: Path) -> float:
    """Return training images per second, the median of the log, so that starts and resumes do not count."""
    logged = (json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines())
    return statistics.median(row["images_per_s"] for row in logged if "images_per_s" in row)


def loaded(run: Training) -> nn.Module:
    """Return the model of a finished run, on a GPU if there is one."""
    return zoo.handover.load(run.folder / "handover")[0].to("cuda" if torch.cuda.is_available() else "cpu")


def attacked(model: nn.Module, data: DataConfig, columns: Sequence[str], limit: int) -> Figures:
    """Return accuracies on the first test images, 'clean' and under ATTACKS."""
    device, right, images = next(model.parameters()).device, dict.fromkeys(columns, 0), 0
    batches = eval_loader(find(data, "test"), data, batch_size=BATCH, limit=limit)
    for index, (_, images_BCHW, labels_B) in enumerate(batches):
        images_BCHW, labels_B = images_BCHW.to(device), labels_B.to(device)
        images += len(labels_B)
        for column in columns:
            x_BCHW = images_BCHW
            if column in ATTACKS:
                x_BCHW = ATTACKS[column].run(model, images_BCHW, labels_B, Generator().manual_seed(index))
            with torch.no_grad():
                right[column] += int((model(x_BCHW).argmax(1) == labels_B).sum())
    return {column: 100 * count / images for column, count in right.items()}
