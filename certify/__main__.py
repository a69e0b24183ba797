"""`python -m certify handover=DIR [data=NAME data.root=FOLDER] [eps=[...]] ...`: the keys of configs/certify.yaml."""

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import zoo
from attacks import AttackConfig
from certify import publication, report, stage
from certizoo import UserError
from certizoo.compose import compose_config
from certizoo.errors import one_line_errors
from shards import DataConfig


@one_line_errors
def main(argv: Sequence[str]) -> None:
    """Certify one hand-over and print its table. Exit status 2: an error of one line."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    config = compose_config("certify", argv)
    handover = _handover(config)
    out = Path(config["out"]) if config["out"] else _default_out(config, handover)
    console = Console(highlight=False)
    columns = (TextColumn("certifying"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=None)
        summary = stage.run(
            handover,
            _data(config, handover),
            _settings(config),
            out,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    console.print(report.accuracy_table(summary))
    console.print(f"curve {out / 'curve.png'}, card {out / 'card.md'}, rows {out / 'certificates.parquet'}")
    if config["publish"]:
        line = publication.publish(
            handover, out, registered_name=config["publish"], run_id=None, experiment=config["experiment"]
        )
        console.print(f"registered: {line}")


def _handover(config: dict[str, Any]) -> Path:
    if bool(config["handover"]) == bool(config["version"]):
        raise UserError("say what to certify: handover=DIR or version=NAME@ALIAS (one of them)")
    if config["handover"]:
        return Path(config["handover"])
    from registry import browse

    return browse.download(config["version"])


def _default_out(config: dict[str, Any], handover: Path) -> Path:
    if config["version"]:
        raise UserError("a published version is certified into a folder of yours; add out=DIR")
    return handover.parent / "certificate"


def _data(config: dict[str, Any], handover: Path) -> DataConfig:
    if config.get("data"):
        return DataConfig(**config["data"])
    saved = zoo.handover.read_config(handover)
    if "data" not in saved:
        raise UserError(f"the config of {handover} names no data; add data=NAME data.root=FOLDER")
    return DataConfig(**saved["data"])


def _settings(config: dict[str, Any]) -> stage.Settings:
    keys = ("method", "images", "headline_eps", "batch_size")
    return stage.Settings(
        eps=tuple(config["eps"]), attack=AttackConfig(**config["attack"]), **{key: config[key] for key in keys}
    )


if __name__ == "__main__":
    main(sys.argv[1:])
