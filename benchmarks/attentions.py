"""The search for the attention that gives the most certified accuracy, with the same budget for each, on CIFAR-10.

    python -m benchmarks.attentions search VARIANT data.root=SHARDS    16 trials, judged on the last test shards
    python -m benchmarks.attentions final VARIANT data.root=SHARDS     the best of them trained with three seeds

VARIANT is dp, l2, scsa, ln, msvp (dp with SpecFormer's penalty in place of the caps on W_Q, W_K and W_V), or gated
(positions beside content, as in ConViT). All share the network and the certified training of
configs/model/cert_gpsa_vit_c10.yaml. The trials of a search train for two epochs of the first 20,000 images; the finals
for six epochs of all images, and are certified by `adjoint` on the first test images, which no search sees. They go to
the registry as attention-VARIANT, trials as attention-VARIANT-trials: a champion beats others on the same images.

Results: benchmarks/results/search_attention_VARIANT.csv of the search; attentions.json, .md and .svg of all finals so
far, written after each.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from benchmarks.msvp import spread
from benchmarks.record import RESULTS, ROOT, record
from benchmarks.trainings import Training, portable, train
from certizoo import UserError
from certizoo.config.compose import compose_config
from certizoo.errors import one_line_errors
from tuning import spaces

NAME = "attentions"
EPS = ("0.1411764705882353", "0.2823529411764706", "0.4235294117647059")  # 36, 72, 108 of 255
CONTENT = "model.gpsa_layers=0"
# variant -> its space and the changes of the network
VARIANTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "dp": ("attention", (CONTENT, "model.attention.name=dp")),
    "l2": ("attention", (CONTENT, "model.attention.name=l2")),
    "scsa": ("attention_scsa", (CONTENT,)),
    "ln": ("attention", (CONTENT, "model.attention.name=ln")),
    "msvp": ("attention_msvp", (CONTENT,)),
    "gated": ("attention", ()),
}
COMMON = ("+model=cert_gpsa_vit_c10", "data=cifar10", "certify.method=adjoint", "certify.search_radii=false")
TRIAL = (
    "data.train=cifar10-train-0000[0-1]?.tar", "data.test=cifar10-test-00000[5-7].tar", "train.epochs=2",
    "train.eval_images=200", "train.certify_images=24", "certify.images=100", f"certify.eps=[{EPS[0]}]",
    "certify.attack.steps=20", "registry.champion_images=100",
)  # fmt: skip
FINAL = ("train.epochs=6", "certify.images=300", f"certify.eps=[{','.join(EPS)}]", "certify.attack.steps=100")
TRIALS = 16
SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Measured:
    """One final: shares of the test images in per cent, those under PGD and certified in the order of EPS.

    `chosen` are the parameters of the best trial, and `without_content` is clean accuracy with all attention scores 0.
    """

    variant: str
    seed: int
    chosen: list[str]
    clean: float
    without_content: float
    certified: list[float]
    attacked: list[float]
    training_minutes: float


def search(variant: str, overrides: Sequence[str]) -> None:
    """Run the variant's search and keep its table."""
    space, own = VARIANTS[variant]
    name = f"attention-{variant}"
    words = [sys.executable, str(ROOT / "tune.py"), "--space", space, "--name", name, "--num-samples", str(TRIALS)]
    words += ["--max-concurrent", "1", "--metric", f"certified_acc@{EPS[0]}", "--metric", "clean_acc", "--"]
    words += [*COMMON, *own, *TRIAL, f"registry.model_name={name}-trials", *overrides]
    if subprocess.run(words, cwd=ROOT).returncode:
        raise UserError(f"the search {name} did not finish; go on with: python tune.py --resume {name}")
    trials = pd.read_csv(ROOT / "runs/tune" / name / "results.csv").drop(columns=["ended", "run_dir", "why"])
    trials.to_csv(table_of(variant), index=False, float_format="%.4g")


def table_of(variant: str) -> Path:
    return RESULTS / f"search_attention_{variant}.csv"


def best_of(variant: str) -> dict[str, Any]:
    """Return the parameters of the trial with the largest certified accuracy; clean accuracy decides between equals.

    Raises:
        UserError: there was no search.
    """
    table = table_of(variant)
    if not table.is_file():
        raise UserError(f"{table} is missing; first run: python -m benchmarks.attentions search {variant}")
    trials = pd.read_csv(table)
    ended = trials[trials["state"] == "certified"]
    row = ended.sort_values([f"certified_acc@{EPS[0]}", "clean_acc"]).iloc[-1]
    return {key: row[key] for key in spaces.load(VARIANTS[variant][0]).parameters}


def final(variant: str, overrides: Sequence[str]) -> None:
    """Train the best trial's parameters with every seed, and add what the certificates say to the results.

    Recorded finals with these parameters are not repeated.
    """
    space, own = VARIANTS[variant]
    chosen = [f"{key}={value:.4g}" for key, value in best_of(variant).items()]
    fixed = (*COMMON, *spaces.load(space).overrides, *own, *chosen, *FINAL, *overrides)
    done = [one for one in recorded() if one.variant != variant or one.chosen == chosen]
    for seed in SEEDS:
        if any((one.variant, one.seed) == (variant, seed) for one in done):
            continue
        name = f"attention-{variant}"
        options = (*fixed, f"registry.model_name={name}", f"name={name}-s{seed}", f"seed={seed}")
        run = Training(options, compose_config("adv_train", options))
        train("adv_train", run, to_file=False)
        done.append(measured(variant, seed, chosen, run))
        write(done, overrides)


def measured(variant: str, seed: int, chosen: list[str], run: Training) -> Measured:
    """Return what the run's certificate and log say."""
    found = json.loads((run.folder / "certificate" / "certificate.json").read_text())
    shares = [found["accuracy"][f"{float(eps):g}"] for eps in EPS]
    logged = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    return Measured(
        variant=variant,
        seed=seed,
        chosen=chosen,
        clean=100 * found["clean"],
        without_content=100 * found["clean_without_content"],
        certified=[100 * share["certified"] for share in shares],
        attacked=[100 * share["pgd"] for share in shares],
        training_minutes=(logged[-1]["time"] - logged[0]["time"]) / 60_000,
    )


def recorded() -> list[Measured]:
    """Return the finals measured before."""
    file = RESULTS / f"{NAME}.json"
    return [Measured(**row) for row in json.loads(file.read_text())["measured"]] if file.is_file() else []


def write(done: Sequence[Measured], overrides: Sequence[str]) -> None:
    """Write the record, the table and the picture."""
    done = sorted(done, key=lambda one: (list(VARIANTS).index(one.variant), one.seed))
    words = " ".join(["python -m benchmarks.attentions final VARIANT", *portable(overrides)])
    record(NAME, {"command": words, "measured": [*map(asdict, done)]})
    (RESULTS / f"{NAME}.md").write_text(markdown(done))
    draw(done)


def markdown(done: Sequence[Measured]) -> str:
    """Format one line per variant: mean and standard deviation over seeds."""
    head = ["attention", "clean %", "scores off %"]
    head += [f"certified / PGD at {255 * float(eps):.0f}/255 %" for eps in EPS]
    lines = [f"| {' | '.join([*head, 'minutes'])} |", f"|{'---|' * (len(head) + 1)}"]
    for variant in dict.fromkeys(one.variant for one in done):
        runs = [one for one in done if one.variant == variant]
        cells = [spread([one.clean for one in runs], 1), spread([one.without_content for one in runs], 1)]
        for place in range(len(EPS)):
            certified, attacked = [one.certified[place] for one in runs], [one.attacked[place] for one in runs]
            cells.append(f"{spread(certified, 1)} / {spread(attacked, 1)}")
        cells.append(spread([one.training_minutes for one in runs], 0))
        lines.append(f"| {variant} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def draw(done: Sequence[Measured]) -> None:
    """Draw certified against clean accuracy, a point for each seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(5, 3.6), layout="constrained")
    for variant in dict.fromkeys(one.variant for one in done):
        runs = [one for one in done if one.variant == variant]
        axis.scatter([one.clean for one in runs], [one.certified[0] for one in runs], label=variant)
    axis.set(xlabel="clean accuracy, %", ylabel="certified at 36/255, %")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(RESULTS / f"{NAME}.svg")
    plt.close(figure)


def asked(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("search", "final"))
    parser.add_argument("variant", choices=VARIANTS)
    parser.add_argument("overrides", nargs="*", help="Hydra overrides, as the trainers take them")
    return parser.parse_intermixed_args(words)


def main() -> None:
    options = asked()
    torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", "1")))
    {"search": search, "final": final}[options.step](options.variant, options.overrides)


if __name__ == "__main__":
    one_line_errors(main)()
