"""Tables of papers at reduced size: every row trained and attacked with one command, our figures beside the published.

    make experiment NAME=table2_deit_ti ARGS='data.root=SHARDS'    (python -m benchmarks.experiments NAME ...)

A row is a run of configs/experiment/NAME.yaml in runs/; a row that is there already is measured, not trained again.
Results: benchmarks/results/experiments_NAME.json and .md.
"""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Generator, nn

import zoo
from attacks import AttackConfig
from benchmarks.record import RESULTS, record
from certizoo import UserError
from certizoo.compose import compose_config
from certizoo.errors import one_line_errors
from certizoo.nearest import unknown
from shards import DataConfig, eval_loader, find

ROOT = Path(__file__).parents[1]
IMAGES, BATCH = 1000, 100
# CW-20 of Mo et al. 2022 is PGD that ascends the margin.
ATTACKS = {
    "CW-20": AttackConfig("linf", 8 / 255, 20, 2 / 255, loss="margin"),
    "PGD-20": AttackConfig("linf", 8 / 255, 20, 2 / 255, loss="ce"),
}


@dataclass(frozen=True)
class Row:
    """A model of ours, its name in the paper, and the paper's figures in per cent."""

    model: str
    method: str
    published: tuple[float, ...]


@dataclass(frozen=True)
class Table:
    """`columns` name the figures of a row: 'clean', then names in ATTACKS."""

    source: str
    differs: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]


DEIT_TI = Table(
    source="SpecFormer (https://arxiv.org/abs/2402.03317), Table 2: DeiT-Ti, CIFAR-10, adversarial training",
    differs="from scratch, not from ImageNet-1k weights; 4 blocks of width 96, patch 8 (there 12 of 192, patch 4); "
    "500 steps of batch 128, 1.3 epochs (40); PGD-2 of 5/255 in training (PGD-10 of 2/255); AdamW, cosine (SGD); "
    "no CutMix and Mixup; CIFAR-10 as JPEG if the shards are; LipsFormer stands for SCSA in standard blocks; the "
    "attacks keep the worst of all points they visit",
    columns=("clean", "CW-20", "PGD-20"),
    rows=(
        Row("dp_deit_ti", "ViT (DP)", (71.71, 37.15, 38.74)),
        Row("l2_deit_ti", "L2Former (L2)", (60.85, 34.29, 36.63)),
        Row("scsa_deit_ti", "LipsFormer (SCSA)", (39.72, 24.05, 26.77)),
        Row("ln_deit_ti", "LNFormer (LN)", (54.32, 29.85, 32.96)),
        Row("spec_deit_ti", "SpecFormer (MSVP)", (80.03, 48.52, 51.10)),
    ),
)
TABLES = {
    "table2_deit_ti": DEIT_TI,
    "table2_deit_ti_gpu": replace(
        DEIT_TI,
        differs="from scratch, not from ImageNet-1k weights; 900 steps of batch 512, 9.2 epochs (40, batch 64); bf16; "
        "PGD-2 of 5/255 in training (PGD-10 of 2/255); AdamW, cosine (SGD); no CutMix and Mixup; CIFAR-10 as JPEG if "
        "the shards are; LipsFormer stands for SCSA in standard blocks; the attacks keep the worst of all points they "
        "visit",
    ),
}


def run(name: str, overrides: Sequence[str]) -> None:
    """Train what is missing, measure every row, write both files."""
    if name not in TABLES:
        raise unknown("table", name, TABLES)
    table, started = TABLES[name], time.monotonic()
    rows = [measured(name, row, table.columns, overrides) for row in table.rows]
    minutes = round((time.monotonic() - started) / 60, 1)
    facts = {"command": f"make experiment NAME={name} ARGS='data.root=SHARDS'", "minutes": minutes}
    result = {"source": table.source, "differs": table.differs, "images": IMAGES, "rows": rows}
    record(f"experiments_{name}", facts | result)
    (RESULTS / f"experiments_{name}.md").write_text(markdown(table, rows))


def measured(name: str, row: Row, columns: Sequence[str], overrides: Sequence[str]) -> dict[str, Any]:
    """One row: trained unless its hand-over is there, then attacked."""
    options = [f"+experiment={name}", f"model={row.model}", *overrides]
    config = compose_config("adv_train", options)
    folder, started = ROOT / config["run_dir"] / "handover", time.monotonic()
    minutes = None  # it was trained before
    if not folder.is_dir():
        train(options)
        minutes = round((time.monotonic() - started) / 60, 1)
    model, _ = zoo.handover.load(folder)
    figures = accuracies(model, DataConfig(**config["data"]), columns)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {
        "method": row.method,
        "model": row.model,
        "parameters": parameters,
        "training_minutes": minutes,
        "ours": figures,
        "published": dict(zip(columns, row.published, strict=True)),
    }


def train(options: Sequence[str]) -> None:
    """One process under the launcher, output shown."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launcher = [sys.executable, str(Path(sys.executable).parent / "deepspeed"), "--num_gpus=1", f"--master_port={port}"]
    command = [*launcher, str(ROOT / "trainers" / "adv_train.py"), *options]
    if subprocess.run(command, cwd=ROOT, env=os.environ).returncode:
        raise UserError(f"the row {options[1]} did not finish; mend what its output says and run the command again")


def accuracies(model: nn.Module, data: DataConfig, columns: Sequence[str]) -> dict[str, float]:
    """Per cent right of the first IMAGES test images, clean and under each attack; on a GPU where there is one."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.to(device)
    right = dict.fromkeys(columns, 0)
    images = 0
    batches = eval_loader(find(data, "test"), data, batch_size=BATCH, limit=IMAGES)
    for index, (_, images_BCHW, labels_B) in enumerate(batches):
        images_BCHW, labels_B = images_BCHW.to(device), labels_B.to(device)
        images += len(labels_B)
        for column in columns:
            x_BCHW = images_BCHW
            if column in ATTACKS:
                x_BCHW = ATTACKS[column].run(model, images_BCHW, labels_B, Generator().manual_seed(index))
            with torch.no_grad():
                right[column] += int((model(x_BCHW).argmax(1) == labels_B).sum())
    return {column: round(100 * count / images, 2) for column, count in right.items()}


def markdown(table: Table, rows: Sequence[dict[str, Any]]) -> str:
    """ours / published in each cell."""
    head = ["method", "model", *(f"{column} ours / published %" for column in table.columns)]
    lines = [f"{table.source}.", "", f"Ours differs: {table.differs}.", ""]
    lines += [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for row in rows:
        cells = [f"{row['ours'][column]:.1f} / {row['published'][column]:.2f}" for column in table.columns]
        lines.append(f"| {' | '.join([row['method'], row['model'], *cells])} |")
    return "\n".join([*lines, "", f"{IMAGES} test images: +-3 points (95 %). One seed.", ""])


def main() -> None:
    if len(sys.argv) < 2:
        raise UserError(f"which table? python -m benchmarks.experiments NAME ...; NAME: {', '.join(TABLES)}")
    run(sys.argv[1], sys.argv[2:])


if __name__ == "__main__":
    one_line_errors(main)()
