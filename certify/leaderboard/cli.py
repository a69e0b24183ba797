"""The commands `python -m certify submit handover=DIR ...` and `python -m certify check ENTRY.json ...`.

Their keys are those of configs/submit.yaml and configs/check.yaml.
"""

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

import zoo
from certify.leaderboard import entry, of_results, recheck, rows
from certify.rows import records
from certify.rows.arguments import Config, Subject, data_of, handover_of
from certizoo import UserError
from certizoo.config.schema import Count, PathText, Text, typed_values
from certizoo.files import disk_errors
from certizoo.progress import progress_bar


@dataclass(frozen=True)
class SubmitKeys(Subject):
    """configs/submit.yaml."""

    results: tuple[PathText, ...] = ()
    title: Text | None = None
    training: Text | None = None
    extra_data: bool = False
    source: Text | None = None
    paper: Text | None = None
    year: Count | None = None


@dataclass(frozen=True)
class CheckKeys(Subject):
    """configs/check.yaml."""

    files: tuple[PathText, ...] = ()
    results: tuple[PathText, ...] = ()
    images: Count = 50


def submit(config: Config) -> None:
    """Write the entry of finished results, and print its path."""
    config = typed_values(SubmitKeys, _listed(config))
    given = any(config.get(key) for key in ("handover", "version", "model"))
    handover = handover_of(config) if given or not config["results"] else None
    results = config["results"] or [str(handover.parent / "certificate")] if handover else config["results"]
    summaries = [of_results.summary_of(Path(folder)) for folder in results]
    if handover is not None and zoo.handover.weights_sha256(handover) != summaries[0]["weights_sha256"]:
        raise UserError(f"{results[0]} is not of the weights in {handover}; set results= to a result of these weights")
    said = {key: config[key] for key in ("title", "training", "extra_data", "source", "paper", "year")}
    made = of_results.entry_of(summaries, **said)
    out = Path(config["out"] or f"{made['name']}.json")
    with disk_errors("make room, or choose another file: out=FILE"):
        records.write_json(out, made)
    Console(highlight=False, markup=False).print(
        f"{out}: python -m certify check {out} data.root=SHARDS", markup=False, soft_wrap=True
    )


def check(config: Config) -> None:
    """Recheck an entry on a sample of images. Raises UserError if it is wrong."""
    config = typed_values(CheckKeys, _listed(config))
    if len(config["files"]) != 1:
        raise UserError("name one entry: python -m certify check ENTRY.json data.root=FOLDER [images=N]")
    path = Path(config["files"][0])
    claim = entry.read(path)
    if not any(config.get(key) for key in ("handover", "version", "model")):
        config = config | {"model": claim["name"]}
    handover = handover_of(config)
    data = data_of(config, handover)
    console = Console(highlight=False, markup=False)
    with progress_bar("certifying again", console) as progress:
        claimed = rows.rows_of([Path(folder) for folder in config["results"]], claim)
        found = recheck.check(claim, handover, data, config["images"], claimed, progress)
    for words in found.words:
        console.print(words, markup=False, soft_wrap=True)
    if found.wrong:
        raise UserError(f"{path} is wrong: {'; '.join(found.wrong)}")
    console.print(f"OK: {path}", markup=False, soft_wrap=True)


def _listed(config: Config) -> Config:
    """Return the config with `results` as a list; one folder needs no brackets."""
    given = config["results"]
    return config | {"results": [given] if isinstance(given, str) else given}
