"""Attacks at certified radii, run after run: none of them may change a certified class.

A trial is a model, an image, a method, a norm and a start of gradient ascent on the margin loss
(tests/tools/trials.py): the zoo's models, reduced, with random and with trained weights. It counts if the radius is
large enough to attack; smaller ones are attacked all the same. Counts add up in benchmarks/results/trials.json, written
after every model: a run continues with the next seeds. A failed certificate is recorded there, and ends this and all
further runs until somebody has examined it. With --redteam every second model has weights that first ascended against
the certificate (benchmarks/redteam/weights.py).

Each run also records `largest_share`: the largest drop / margin that an attack found at a certified radius, where the
claimed loss is just below the margin.

    python -m benchmarks.trials [--trials N] [--minutes M] [--redteam]
"""

import argparse
import json
import sys
import time
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table
from torch import Tensor

import zoo
from benchmarks.record import RESULTS, circumstances, write
from benchmarks.redteam.weights import Climbed
from tests.tools.trials import STEPS, WORTH, Outcome, Subject, numbered, outcomes

NAME = "trials"
IMAGES = 4  # of each model
STARTS = {"vit": 512, "swin": 256, "convnet": 32}  # of each image, method and norm, by its cost
Result = dict[str, Any]
COUNTS = ("models", "images", "worth", "trials", "beaten")


def begun() -> Result:
    """Return the counts of earlier runs."""
    path = RESULTS / f"{NAME}.json"
    if path.exists():
        return json.loads(path.read_text())
    return {"worth_above": WORTH, "steps": STEPS, "trials": 0, "beaten": [], "rows": [], "runs": []}


def next_seed(result: Result) -> int:
    return max((run["seeds"][1] + 1 for run in result["runs"]), default=0)


def backbone_of(subject: Subject) -> str:
    return str(zoo.model_options(subject.name)["backbone"])


def starts_of(subject: Subject) -> int:
    return STARTS[backbone_of(subject)]


def add(result: Result, subject: Subject, found: Iterable[Outcome]) -> None:
    """Add the outcomes of one model."""
    rows = {(row["norm"], row["method"]): row for row in result["rows"]}
    run, starts = result["runs"][-1], starts_of(subject)
    for outcome in found:
        key = outcome.norm, outcome.method
        row = rows.setdefault(key, dict(zip(("norm", "method"), key, strict=True)) | dict.fromkeys(COUNTS, 0))
        counts = 1, len(outcome.worth_B), outcome.worth, outcome.worth * starts, int(outcome.beaten_B.sum())
        for name, count in zip(COUNTS, counts, strict=True):
            row[name] += count
        run["trials"] += outcome.worth * starts
        run["redteam"] += outcome.worth * starts * isinstance(subject, Climbed)
        run["largest_share"] = max(run["largest_share"], outcome.share)
        result["trials"] += outcome.worth * starts
        result["beaten"] += [beaten(subject, outcome, index) for index in outcome.beaten_B.nonzero()]
    result["rows"] = [rows[key] for key in sorted(rows)]
    run["seeds"][1] = subject.seed


def beaten(subject: Subject, outcome: Outcome, index: Tensor) -> Result:
    """Return everything needed to reproduce this outcome."""
    return {
        "kind": subject.kind,
        "model": subject.name,
        "options": subject.options,
        "weights": subject.weights,
        "seed": subject.seed,
        "redteam": isinstance(subject, Climbed),
        "images": IMAGES,
        "image": int(index),
        "starts": starts_of(subject),
        "method": outcome.method,
        "norm": outcome.norm,
        "radius": float(outcome.radius_B[index]),
        "margin_loss": float(outcome.found_B[index]),
    }


def show(result: Result) -> None:
    table = Table("norm", "method", *COUNTS, box=None, pad_edge=False)
    for row in result["rows"]:
        table.add_row(*(str(value) for value in row.values()))
    Console().print(table)
    climbed = sum(run["redteam"] for run in result["runs"])
    print(
        f"{result['trials']:,} trials in {len(result['runs'])} runs, {climbed:,} of red-team weights, "
        f"{len(result['beaten'])} certificates beaten"
    )
    run = result["runs"][-1]
    print(
        f"this run: {run['trials']:,} trials, {run['redteam']:,} of red-team weights; largest drop / margin "
        f"{run['largest_share']:.6f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=1_000_000, metavar="N", help="least number of trials of this run")
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), metavar="M", help="time limit; the model in progress is finished"
    )
    parser.add_argument(
        "--backbones",
        nargs="+",
        default=list(STARTS),
        choices=STARTS,
        metavar="B",
        help="backbones to test (default: all)",
    )
    parser.add_argument(
        "--redteam", action="store_true", help="give every second model weights found by gradient ascent"
    )
    arguments = parser.parse_args()
    end, result = time.monotonic() + 60 * arguments.minutes, begun()
    first = next_seed(result)
    run = circumstances() | {"seeds": [first, first - 1], "trials": 0, "redteam": 0, "largest_share": 0.0}
    result["runs"].append(run)
    write(NAME, result)  # also if the time is over before the first model
    while run["trials"] < arguments.trials and time.monotonic() < end and not result["beaten"]:
        subject = numbered(next_seed(result))
        if backbone_of(subject) not in arguments.backbones:
            run["seeds"][1] = subject.seed
            continue
        if arguments.redteam and subject.seed % 2:
            subject = Climbed.after(subject)
        add(result, subject, outcomes(subject, IMAGES, starts_of(subject)))
        write(NAME, result)
    show(result)
    if result["beaten"]:
        sys.exit(f"a certificate was beaten: see {RESULTS / NAME}.json")


if __name__ == "__main__":
    main()
