"""The arithmetic of runs that were not made: a table of factors each, and their product.

Every factor comes from a file of benchmarks/results, with its command, from a configuration, or is named as assumed.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.record import RESULTS
from certizoo.config.compose import compose_config
from docs.generate.tables import cell, table
from zoo.models.overview import summary

NODES, GPUS = 8, 8
RANKS = NODES * GPUS
MODEL, EXPERIMENT = "spec_vit_b", "specformer_imagenet_adv"
STEP, BATCH = "train_step_cuda_bf16_compiled", 128  # images a GPU
# Not ours to measure: ILSVRC 2012, and a common cluster.
IMAGES, KILOBYTES = 1_281_167, 108.0
NETWORK, DISK = 25e9, 1e9  # bytes/s of a GPU between nodes, and of the storage
TRIALS, EPOCHS_OF_A_TRIAL = 200, 10
FLOAT = 4  # bytes


@dataclass(frozen=True)
class Factor:
    """A line of a table: `source` is a file of the results, or words."""

    what: str
    value: str
    source: str

    def cells(self) -> tuple[str, str, str]:
        if not (RESULTS / f"{self.source}.json").is_file():
            return cell(self.what), self.value, cell(self.source)
        link = f"[`{self.source}`](../../benchmarks/results/{self.source}.json)"
        return cell(self.what), self.value, f"{link}: `{recorded(self.source)['command']}`"


def recorded(name: str) -> dict[str, Any]:
    """Return a file of the results."""
    return dict(json.loads((RESULTS / f"{name}.json").read_text()))


def markdown() -> str:
    """Return the tables of the page."""
    parts = {
        f"## ImageNet-1k with `{MODEL}` on {NODES} nodes of {GPUS} GPUs": training(),
        "## What the ranks send": None,
        f"## A search of {TRIALS} trials": search(),
    }
    tables = {head: communication() if rows is None else _table(rows) for head, rows in parts.items()}
    return "\n".join(f"{head}\n\n{text}" for head, text in tables.items())


def _table(rows: Iterator[Factor]) -> str:
    return table(("factor", "value", "from"), [row.cells() for row in rows])


# training ------------------------------------------------------------------------------------------------------------


def step_seconds() -> float:
    """Return the seconds of a step of BATCH images a GPU at the recipe's attack: linear in the attack's steps."""
    two, ten = (recorded(STEP)[f"pgd_{steps}"]["seconds_step"] for steps in (2, 10))
    return float(two + (ten - two) * (recipe()["attack"]["steps"] - 2) / 8)


def recipe() -> dict[str, Any]:
    """Return the configuration of the training."""
    return compose_config("adv_train", [f"+experiment={EXPERIMENT}"])


def hours(epochs: int, gpus: int) -> float:
    """Return the hours of so many epochs on so many GPUs, none of which waits."""
    return epochs * IMAGES / gpus / BATCH * step_seconds() / 3600


def images_per_core() -> float:
    """Return the images/s that a core reads, decodes and crops, of the size of the recorded ones."""
    return float(recorded("loader_cpu")["workers_0"]["images_per_cpu_second"]["loader"])


def training() -> Iterator[Factor]:
    epochs, every = recipe()["train"]["epochs"], recipe()["train"]["checkpoint_every"]
    attack, parameters, step = recipe()["attack"]["steps"], summary(MODEL).parameters, step_seconds()
    rate = BATCH / step
    small, measured = recorded("loader_cpu")["mean_kilobytes"], images_per_core()
    loader = measured * small / KILOBYTES
    restart = recorded("start_cpu")["launcher"] + recorded("resume_cpu")["other_ranks_middle"]["seconds"]
    read, saved = GPUS * rate * KILOBYTES * 1e3, 3 * FLOAT * parameters
    lost = every * step + restart
    yield Factor(f"seconds of a step on an H100, bf16, compiled, PGD-{attack}, batch {BATCH}", f"{step:.3f}", STEP)
    yield Factor("images/s of a GPU", f"{rate:.0f}", "batch / seconds")
    yield Factor("images and epochs", f"{IMAGES:,} x {epochs}", f"ILSVRC 2012; `experiment={EXPERIMENT}`")
    yield Factor("hours, if no GPU waits", f"**{hours(epochs, RANKS):.2f}**", f"images epochs / ({RANKS} x images/s)")
    yield Factor(f"images/s that a core loads, of {small:.0f} kB", f"{measured:.0f}", "loader_cpu")
    yield Factor(
        f"images/s that a core loads, of {KILOBYTES:.0f} kB, the mean size in ImageNet",
        f"{loader:.0f}",
        "assumed: the time is that of the bytes",
    )
    yield Factor("cores that load for a node", f"{GPUS * rate / loader:.1f}", f"{GPUS} x images/s of GPU and core")
    yield Factor("bytes read by a node", f"{read / 1e9:.2f} GB/s", f"{GPUS} x images/s of a GPU x {KILOBYTES:.0f} kB")
    yield Factor(
        "a checkpoint", f"{saved / 1e9:.2f} GB", f"weights and two momenta of {parameters / 1e6:.1f} M weights"
    )
    yield Factor("seconds to write it", f"{saved / DISK:.1f}", f"assumed: {DISK / 1e9:g} GB/s")
    yield Factor("seconds to start a launcher", f"{recorded('start_cpu')['launcher']:.1f}", "start_cpu")
    yield Factor(
        "seconds to the first batch on other ranks", f"{restart - recorded('start_cpu')['launcher']:.1f}", "resume_cpu"
    )
    yield Factor(
        "minutes that a lost node costs at most", f"{lost / 60:.1f}", f"{every} steps done again, and both starts"
    )


def communication() -> str:
    """Compare counted bytes with the formula, and apply it to the cluster."""
    parameters, rows = summary(MODEL).parameters, []
    for row in recorded("communication_cpu")["rows"]:
        stage, ranks, sent = row["stage"], row["ranks"], row["parameters_sent"]
        if ranks == 1:
            continue
        whole = sent * ranks / (ranks - 1)  # of the tensors of all weights, each counted once
        far = whole * (RANKS - 1) / RANKS * FLOAT * parameters
        rows.append((str(stage), str(ranks), f"{sent:.2f}", f"{whole:.2f}", f"{far / 1e9:.2f}", f"{far / NETWORK:.3f}"))
    head = ("ZeRO", "ranks counted", "sent / 4 P", "without (N-1)/N", f"GB a step, {RANKS} GPUs", "seconds")
    return table(head, rows)


# searches ------------------------------------------------------------------------------------------------------------


def search() -> Iterator[Factor]:
    tune, many = recorded("tune_cpu"), recorded("many_trials_cpu")
    of_trial = hours(EPOCHS_OF_A_TRIAL, GPUS)
    turns, each = TRIALS / NODES, of_trial + tune["start_s"] / 3600
    yield Factor(f"hours of a trial, {EPOCHS_OF_A_TRIAL} epochs of ImageNet on a node", f"{of_trial:.2f}", STEP)
    yield Factor("seconds before a trial trains", f"{tune['start_s']:g}", "tune_cpu")
    yield Factor("trials one after the other on a node", f"{turns:g}", f"{TRIALS} trials / {NODES} nodes")
    yield Factor(
        "hours of the search without early stopping",
        f"**{turns * each:.1f}**",
        "their product",
    )
    beside = many["beside_trainers_cpu_s_a_trial"]
    yield Factor("processor minutes of driver and registry", f"{TRIALS * beside / 60:.1f}", "many_trials_cpu")
    yield Factor("memory of the driver", f"{many['driver_mb_most']} MB", "many_trials_cpu")
