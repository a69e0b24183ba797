"""Tables of papers at reduced size: every row trained and measured with one command, beside the published figures.

    make experiment NAME=table2_deit_ti ARGS='data.root=SHARDS'    (python -m benchmarks.experiments NAME ...)
    make experiment NAME=table2_small ARGS='--at-once 2 data.root=SHARDS'

A row is a run of configs/experiment/NAME.yaml for each of its seeds, in runs/. An existing run is measured without
training again, and one that was trained with other settings is refused. With --at-once N, N runs train side by side,
one per CPU core, or as many as the host of a GPU can feed; their output is then in runs/RUN.log. Results, written after
each training: benchmarks/results/experiments_NAME.json and .md.
"""

import argparse
import math
import os
import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

import torch

import zoo
from benchmarks.paper_tables import TABLES, Row, Table
from benchmarks.record import RESULTS, record
from benchmarks.trainings import Figures, Training, pace, portable, train
from certizoo import UserError
from certizoo.config.compose import compose_config
from certizoo.errors import one_line_errors
from certizoo.nearest import unknown


@dataclass(frozen=True)
class Ended:
    """A measured run."""

    figures: Figures
    parameters: int
    images_per_s: float


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
