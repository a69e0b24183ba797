"""`python -m certify handover=DIR [data=NAME data.root=FOLDER] [eps=[...]] ...`: the keys of configs/certify.yaml.

`python -m certify analyse handover=DIR ...`: the figures of the papers for one model; the keys of configs/analyse.yaml.

`python -m certify features handover=DIR [against=DIR2] ...`: features under attack; the keys of configs/features.yaml.
"""

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import zoo
from attacks import AttackConfig
from certify import analysis, feature_figures, feature_report, publication, report, stage
from certizoo import UserError
from certizoo.compose import compose_config
from certizoo.errors import one_line_errors
from shards import DataConfig


@one_line_errors
def main(argv: Sequence[str]) -> None:
    """Certify one hand-over and print its table. Exit status 2: an error of one line."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    if list(argv[:1]) == ["analyse"]:
        _analyse(compose_config("analyse", argv[1:]))
    elif list(argv[:1]) == ["features"]:
        _features(compose_config("features", argv[1:]))
    else:
        try:
            _certify(compose_config("certify", argv))
        except KeyboardInterrupt:
            raise UserError("stopped; the same command goes on after the last row") from None


def _certify(config: dict[str, Any]) -> None:
    handover = _handover(config)
    out = Path(config["out"]) if config["out"] else _default_out(config, handover)
    console = Console(highlight=False)
    with _progress("certifying", console) as progress:
        summary = stage.run(handover, _data(config, handover), _settings(config), out, progress)
    console.print(report.accuracy_table(summary))
    console.print(
        f"curve {out / 'curve.png'}, card {out / 'card.md'}, rows {out / 'certificates.parquet'}", soft_wrap=True
    )
    console.print(f"report {out / stage.REPORT}", soft_wrap=True)
    if config["publish"]:
        line = publication.publish(
            handover, out, registered_name=config["publish"], run_id=None, experiment=config["experiment"]
        )
        console.print(f"registered: {line}")


def _analyse(config: dict[str, Any]) -> None:
    handover = _handover(config)
    out = Path(config["out"]) if config["out"] else _default_out(config, handover)
    settings = analysis.Settings(**{field.name: config[field.name] for field in fields(analysis.Settings)})
    console = Console(highlight=False)
    with _progress("analysing", console) as progress:
        table = analysis.run(handover, _data(config, handover), settings, out, progress)
    console.print("largest change of X + F(X) at the first attention, mean over the images", soft_wrap=True)
    console.print(analysis.text(table), markup=False, soft_wrap=True)
    console.print(f"figures and tables in {out / analysis.FOLDER}", soft_wrap=True)


def _features(config: dict[str, Any]) -> None:
    handover = _handover(config)
    out = Path(config["out"]) if config["out"] else _default_out(config, handover).with_name("features")
    against = Path(config["against"]) if config["against"] else None
    chosen = {field.name: config[field.name] for field in fields(feature_report.Settings)}
    settings = feature_report.Settings(**chosen | {"attack": AttackConfig(**config["attack"])})
    console = Console(highlight=False)
    with _progress("attacking", console) as progress:
        summary = feature_report.run(handover, against, _data(config, handover), settings, out, progress)
    console.print(feature_figures.closing_table(summary))
    console.print(summary["note"], soft_wrap=True)
    console.print(f"figures and tables in {out}", soft_wrap=True)


@contextmanager
def _progress(title: str, console: Console) -> Iterator[Callable[[int, int], None]]:
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


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
    chosen = {field.name: config[field.name] for field in fields(stage.Settings)}
    return stage.Settings(**chosen | {"eps": tuple(config["eps"]), "attack": AttackConfig(**config["attack"])})


if __name__ == "__main__":
    main(sys.argv[1:])
