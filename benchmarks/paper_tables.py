"""The tables of papers that benchmarks/experiments.py makes at reduced size: their rows and the published figures."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import sentences
from benchmarks.trainings import Figures, Training, attacked, loaded
from certizoo.shards import DataConfig


@dataclass(frozen=True)
class Row:
    """One of our models, its name in the paper, the paper's figures in per cent, and the row's other settings.

    A paper that only draws curves has no figures.
    """

    model: str
    method: str
    published: tuple[float, ...]
    options: tuple[str, ...] = ()


def accuracies(run: Training, table: "Table") -> Figures:
    """Return accuracies of a run on the first test images; on a GPU if there is one."""
    return attacked(loaded(run), DataConfig(**run.config["data"]), table.columns, table.images)


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
