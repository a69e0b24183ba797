"""Tables of papers at reduced size: every row trained and measured with one command, beside the published figures.

    make experiment NAME=table2_deit_ti ARGS='data.root=SHARDS'    (python -m benchmarks.experiments NAME ...)
    make experiment NAME=table2_small ARGS='--at-once 2 data.root=SHARDS'

A row is a run of configs/experiment/NAME.yaml for each of its seeds, in runs/. An existing run is measured without
training again, and one that was trained with other settings is refused. With --at-once N, N runs train side by side,
one per CPU core, or as many as the host of a GPU can feed; their output is then in runs/RUN.log. Results, written after
each training: benchmarks/results/experiments_NAME.json and .md.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Generator, nn

import zoo
from benchmarks import sentences
from benchmarks.record import RESULTS, record
from certizoo import UserError
from certizoo.attacks import AttackConfig
from certizoo.config.compose import compose_config
from certizoo.errors import one_line_errors
from certizoo.nearest import unknown
from certizoo.ports import free_port
from certizoo.shards import DataConfig, eval_loader, find

ROOT = Path(__file__).parents[1]
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
class Row:
    """One of our models, its name in the paper, the paper's figures in per cent, and the row's other settings.

    A paper that only draws curves has no figures.
    """

    model: str
    method: str
    published: tuple[float, ...]
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ended:
    """A measured run."""

    figures: Figures
    parameters: int
    images_per_s: float


@dataclass(frozen=True)
class Training:
    """A run: the command line that defines it, and the configuration that it composes."""

    options: tuple[str, ...]
    config: dict[str, Any]

    @property
    def folder(self) -> Path:
        return ROOT / self.config["run_dir"]


def accuracies(run: Training, table: "Table") -> Figures:
    """Return accuracies of a run on the first test images; on a GPU if there is one."""
    return attacked(loaded(run), DataConfig(**run.config["data"]), table.columns, table.images)


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


def certified(run: Training, table: "Table") -> Figures:
    """Return the certified shares of the run's own stage at the radii that name the columns."""
    accuracy = json.loads((run.folder / "certificate" / "certificate.json").read_text())["accuracy"]
    return {column: 100 * accuracy[column]["certified"] for column in table.columns}


def of_sentences(run: Training, table: "Table") -> Figures:
    """Return certified and attacked shares of the run's sentences."""
    return sentences.figures(run.folder, DataConfig(**run.config["data"]))


@dataclass(frozen=True)
class Table:
    """A table of a paper at reduced size.

    `columns` name the figures of a row, which `measure` computes on so many `images` (`what`); `script` is the trainer
    of all rows. `draw` makes a picture of the rows.
    """

    source: str
    differs: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    draw: Callable[[Sequence[dict[str, Any]], Path], None] | None = None
    script: str = "adv_train"
    seeds: tuple[int, ...] = (0,)
    images: int = 1000
    what: str = "images"
    measure: Callable[[Training, "Table"], Figures] = accuracies


ALWAYS = (
    "AdamW, cosine (SGD); no CutMix and Mixup; CIFAR-10 as JPEG if the shards are; LipsFormer stands for SCSA in "
    "standard blocks; the attacks keep the worst of all points they visit"
)
OWN_STEPS = "PGD-2 in steps of 1/255 from the image (not said there)"
OWN_ATTACK = "PGD-2 of 5/255 in training (PGD-10 of 2/255)"
DEIT_TI = Table(
    source="SpecFormer (https://arxiv.org/abs/2402.03317), Table 2: DeiT-Ti, CIFAR-10, adversarial training",
    differs="from scratch, not from ImageNet-1k weights; 4 blocks of width 96, patch 8 (there 12 of 192, patch 4); "
    f"500 steps of batch 128, 1.3 epochs (40); {OWN_ATTACK}; {ALWAYS}",
    columns=("clean", "CW-20", "PGD-20"),
    rows=(
        Row("dp_deit_ti", "ViT (DP)", (71.71, 37.15, 38.74)),
        Row("l2_deit_ti", "L2Former (L2)", (60.85, 34.29, 36.63)),
        Row("scsa_deit_ti", "LipsFormer (SCSA)", (39.72, 24.05, 26.77)),
        Row("ln_deit_ti", "LNFormer (LN)", (54.32, 29.85, 32.96)),
        Row("spec_deit_ti", "SpecFormer (MSVP)", (80.03, 48.52, 51.10)),
    ),
)
SMALL = (
    "from scratch, not from ImageNet-1k weights; 2 blocks of width 96, patch 8 (there 12 of 192, patch 4); 30 epochs "
    f"of batch 512 (40 of 64); bf16; {ALWAYS}"
)
SEEDS = (0, 1, 2)
STANDARD = {
    "dp_deit_ti": (86.40, 46.10, 14.46),
    "l2_deit_ti": (78.09, 36.64, 5.05),
    "scsa_deit_ti": (72.54, 36.14, 3.46),
    "ln_deit_ti": (77.16, 34.78, 3.81),
    "spec_deit_ti": (87.42, 45.71, 18.10),
}
IMAGENETTE = (
    "from scratch, not from ImageNet-1k weights; the first {} test images; {} of 40 epochs, batch 128 (64); bf16; "
    "AdamW, cosine (SGD); no CutMix and Mixup; scaled cosine attention in standard blocks stands for LipsFormer; the "
    "attacks keep the worst of all points they visit"
)
IMAGENETTE_SMALL = f"64 pixels from JPEG of 96 (224); 2 blocks of width 96, patch 8 (12 of 192, patch 16); {IMAGENETTE}"
# The published figures, in the order of DEIT_TI's rows.
STANDARD_IMAGENETTE = ((90.0, 64.2, 13.0), (82.4, 51.0, 6.0), (79.4, 30.6, 8.0), (80.2, 44.8, 9.2), (92.2, 70.2, 26.2))
ADVERSARIAL_IMAGENETTE = (
    (79.0, 40.6, 41.4),
    (77.4, 41.4, 43.2),
    (39.0, 27.6, 28.4),
    (72.2, 39.0, 42.2),
    (82.2, 46.2, 46.0),
)
# lambda 1e-4 is the paper's for SGD; AdamW normalises its steps, so 1e-2 is needed for an effect.
STRONG = tuple(f"penalty.lambda_{branch}=1e-2" for branch in "qkv")


def imagenette(name: str, figures: Sequence[tuple[float, ...]]) -> tuple[Row, ...]:
    """Return the rows of the table on Imagenette, with the published figures, and one row with a larger lambda."""
    rows = [replace(row, published=each) for row, each in zip(DEIT_TI.rows, figures, strict=True)]
    options = (*STRONG, f"name={name}-spec_deit_ti_strong-s${{seed}}")
    return (*rows, replace(rows[-1], method="SpecFormer (MSVP), lambda 1e-2", options=options))


TABLE1_IMAGENETTE = Table(
    source="SpecFormer (https://arxiv.org/abs/2402.03317), Table 1: DeiT-Ti, Imagenette, standard training, attacks of "
    "2/255",
    differs=f"{IMAGENETTE.format(1000, 40)}; {OWN_STEPS}",
    columns=("clean", "FGSM", "PGD-2"),
    rows=imagenette("table1_imagenette", STANDARD_IMAGENETTE),
    script="std_train",
)
TABLE2_IMAGENETTE = Table(
    source="SpecFormer (https://arxiv.org/abs/2402.03317), Table 2: DeiT-Ti, Imagenette, adversarial training",
    differs=f"{IMAGENETTE.format(1000, 24)}; {OWN_ATTACK}",
    columns=("clean", "CW-20", "PGD-20"),
    rows=imagenette("table2_imagenette", ADVERSARIAL_IMAGENETTE),
)
TABLES = {
    "table2_deit_ti": DEIT_TI,
    "table2_deit_ti_gpu": replace(
        DEIT_TI,
        differs="from scratch, not from ImageNet-1k weights; 900 steps of batch 512, 9.2 epochs (40, batch 64); bf16; "
        f"{OWN_ATTACK}; {ALWAYS}",
    ),
    "table1_small": Table(
        source="SpecFormer (https://arxiv.org/abs/2402.03317), Table 1: DeiT-Ti, CIFAR-10, standard training, attacks "
        "of 2/255",
        differs=f"{SMALL}; {OWN_STEPS}",
        columns=("clean", "FGSM", "PGD-2"),
        rows=tuple(replace(row, published=STANDARD[row.model]) for row in DEIT_TI.rows),
        script="std_train",
        seeds=SEEDS,
        images=5000,
    ),
    "table2_small": replace(DEIT_TI, differs=f"{SMALL}; {OWN_ATTACK}", seeds=SEEDS, images=5000),
    "table1_imagenette": TABLE1_IMAGENETTE,
    "table2_imagenette": TABLE2_IMAGENETTE,
    "table1_imagenette_small": replace(
        TABLE1_IMAGENETTE,
        differs=f"{IMAGENETTE_SMALL.format(3000, 40)}; {OWN_STEPS}",
        rows=imagenette("table1_imagenette_small", STANDARD_IMAGENETTE),
        images=3000,
    ),
    "table2_imagenette_small": replace(
        TABLE2_IMAGENETTE,
        differs=f"{IMAGENETTE_SMALL.format(3000, 24)}; {OWN_ATTACK}",
        rows=imagenette("table2_imagenette_small", ADVERSARIAL_IMAGENETTE),
        images=3000,
    ),
    "lofast_table1": Table(
        source="LoFAST, Table 1: ViTs of 128 features, CIFAR-10, standard training, certified by Theorem 1 at L2 radii",
        differs="the paper states neither its training nor the caps of this table: 30 epochs, AdamW without weight "
        "decay, batch 512, W_V and W_O at most 0.25; CIFAR-10 as JPEG if the shards are",
        columns=("0.02", "0.05", "0.1"),
        rows=(
            Row("lofast_vit_w128_l3", "ViT, 3 layers", (29.1, 16.0, 3.0)),
            Row("lofast_vit_w128_l4", "ViT, 4 layers", (28.9, 11.9, 0.8)),
            Row("lofast_vit_w128_l5", "ViT, 5 layers", (27.6, 8.3, 0.0)),
        ),
        script="std_train",
        seeds=SEEDS,
        measure=certified,
    ),
    "lofast_text": Table(
        source="LoFAST, appendix D, Figure 5: transformers on SST-2, standard training, L2 balls of word embeddings",
        differs="the paper states no training and draws curves only; embeddings lie in [0,1]; AdamW without weight "
        "decay, 4 epochs of batch 256; PGD and the adjoint certificate are ours",
        columns=sentences.COLUMNS,
        rows=tuple(
            Row(f"lofast_text_l{layers}_h{heads}", sentences.method(layers, heads, cap), (), sentences.options(cap))
            for layers, heads, cap in sentences.GRID
        ),
        draw=sentences.draw,
        script="std_train",
        seeds=SEEDS,
        images=200,
        what="sentences",
        measure=of_sentences,
    ),
}


def run(name: str, overrides: Sequence[str], at_once: int = 1) -> None:
    """Train what is missing and measure it, seed by seed; both files are updated after each training."""
    if name not in TABLES:
        raise unknown("table", name, TABLES)
    table = TABLES[name]
    runs = [(row, training(table, name, row, seed, overrides)) for seed in table.seeds for row in table.rows]
    facts = {"command": command(name, overrides, at_once), "source": table.source, "differs": table.differs}
    ended: dict[int, Ended] = {}  # by its index in `runs`, in the order of completion
    with ThreadPoolExecutor(at_once) as pool:
        work = {pool.submit(trained, table, one, at_once > 1): place for place, (_, one) in enumerate(runs)}
        for future in as_completed(work):
            if future.exception():
                pool.shutdown(cancel_futures=True)
            ended[work[future]] = future.result()
            found = {row: [ended[place] for place in sorted(ended) if runs[place][0] is row] for row in table.rows}
            rows = [summary(table, row, each) for row, each in found.items() if each]
            done = {"images": table.images, "runs": f"{len(ended)} of {len(runs)}", "rows": rows}
            record(f"experiments_{name}", facts | done)
            (RESULTS / f"experiments_{name}.md").write_text(markdown(table, rows))
            if table.draw:
                table.draw(rows, RESULTS / f"experiments_{name}.svg")


def command(name: str, overrides: Sequence[str], at_once: int) -> str:
    """Return the command that makes the same table on another machine."""
    options = [f"--at-once {at_once}"] if at_once > 1 else []
    return f"make experiment NAME={name} ARGS='{' '.join([*options, *portable(overrides)])}'"


def portable(overrides: Sequence[str]) -> list[str]:
    """Return the overrides with SHARDS for the folder of this machine's data."""
    return ["data.root=SHARDS" if word.startswith("data.root=") else word for word in overrides]


def training(table: Table, name: str, row: Row, seed: int, overrides: Sequence[str]) -> Training:
    """Return the training of one row and seed."""
    options = (f"+experiment={name}", f"model={row.model}", f"seed={seed}", *row.options, *overrides)
    return Training(options, compose_config(table.script, options))


def trained(table: Table, run: Training, to_file: bool) -> Ended:
    """Train the run if necessary, and measure it."""
    train(table.script, run, to_file)
    model, _ = zoo.handover.load(run.folder / "handover")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return Ended(table.measure(run, table), parameters, pace(run.folder))


def pace(folder: Path) -> float:
    """Return training images per second, the median of the log, so that starts and resumes do not count."""
    logged = (json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines())
    return statistics.median(row["images_per_s"] for row in logged if "images_per_s" in row)


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


def summary(table: Table, row: Row, each: Sequence[Ended]) -> dict[str, Any]:
    """Return one row: mean and standard deviation (none for one seed) over the available seeds, and each of them."""
    figures = {column: [one.figures[column] for one in each] for column in table.columns}
    return {
        "method": row.method,
        "model": row.model,
        "parameters": each[0].parameters,
        "training_images_per_s": round(statistics.median(one.images_per_s for one in each)),
        "ours": {column: round(statistics.mean(values), 2) for column, values in figures.items()},
        "deviation": {
            column: round(statistics.stdev(values), 2) if len(each) > 1 else None for column, values in figures.items()
        },
        "seeds": [{column: round(value, 2) for column, value in one.figures.items()} for one in each],
        "published": dict(zip(table.columns, row.published, strict=bool(row.published))),
    }


def markdown(table: Table, rows: Sequence[dict[str, Any]]) -> str:
    """Format ours / published in each cell, or ours alone."""
    versus = " ours / published" if any(row["published"] for row in rows) else ""
    head = ["method", "model", *(f"{column}{versus} %" for column in table.columns)]
    lines = [f"{table.source}.", "", f"Ours differs: {table.differs}.", ""]
    lines += [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for row in rows:
        cells = [_with_spread(row, column) + _published(row, column) for column in table.columns]
        lines.append(f"| {' | '.join([row['method'], row['model'], *cells])} |")
    counts = sorted({len(row["seeds"]) for row in rows})
    seeds = "One seed" if counts == [1] else f"Mean and standard deviation of {' or '.join(map(str, counts))} seeds"
    points = 100 * 1.96 * math.sqrt(0.25 / table.images)
    certain = f"{table.images} test {table.what}: +-{points:.1f} points (95 %) at most"
    return "\n".join([*lines, "", f"{certain}. {seeds}.", ""])


def _published(row: dict[str, Any], column: str) -> str:
    return f" / {row['published'][column]:.2f}" if row["published"] else ""


def _with_spread(row: dict[str, Any], column: str) -> str:
    spread = row["deviation"][column]
    return f"{row['ours'][column]:.1f}" + (f" +- {spread:.1f}" if spread is not None else "")


def asked(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line, with options before, between and after the other words."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help=", ".join(TABLES))
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="trainings that run at the same time")
    parser.add_argument("overrides", nargs="*", help="Hydra overrides, as the trainers take them")
    return parser.parse_intermixed_args(words)


def main() -> None:
    options = asked()
    if options.at_once < 1:
        raise UserError(f"--at-once {options.at_once} is invalid; give at least 1")
    share = max(1, len(os.sched_getaffinity(0)) // options.at_once)  # of the cores, for measuring and for training
    torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", str(share))))
    run(options.name, options.overrides, options.at_once)


if __name__ == "__main__":
    one_line_errors(main)()
