"""`python -m certify handover=DIR [data=NAME data.root=FOLDER] [eps=[...]] ...`: the keys of configs/certify.yaml.

`python -m certify evaluate handover=DIR protocol=NAME ...`: attacks beside certificates; configs/evaluate.yaml.
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
from certify.evaluation import report as evaluation_report
from certify.evaluation import run as evaluation
from certify.evaluation.settings import Settings as EvaluationSettings
from certify.methods.certificate import UnsoundCertificate
from certify.papers import analysis, feature_figures, feature_report
from certify.stage import register, tables
from certify.stage import run as stage
from certify.stage.settings import Settings as StageSettings
from certizoo import UserError
from certizoo.compose import compose_config
from certizoo.errors import one_line_errors
from certizoo.nearest import unknown
from shards import DataConfig


@one_line_errors
def main(argv: Sequence[str]) -> None:
    """Certify, evaluate or analyse one hand-over and print its table. Exit status 2: an error of one line."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    name = argv[0] if argv and argv[0] in COMMANDS else "certify"
    if argv and argv[0].isidentifier() and argv[0] not in COMMANDS:
        raise unknown("command", argv[0], COMMANDS)
    try:
        COMMANDS[name](compose_config(name, argv[1:] if argv[:1] == [name] else argv))
    except KeyboardInterrupt:
        raise UserError("stopped; the same command goes on after the last row") from None
    except UnsoundCertificate as error:
        raise UserError(str(error)) from None


def _certify(config: dict[str, Any]) -> None:
    handover = _handover(config)
    out = Path(config["out"]) if config["out"] else _default_out(config, handover)
    console = Console(highlight=False)
    with _progress("certifying", console) as progress:
        summary = stage.run(handover, _data(config, handover), _settings(config), out, progress)
    console.print(tables.accuracy_table(summary))
    console.print(
        f"curve {out / 'curve.png'}, card {out / 'card.md'}, rows {out / 'certificates.parquet'}", soft_wrap=True
    )
    console.print(f"report {out / stage.REPORT}", soft_wrap=True)
    if config["publish"]:
        line = register.publish(
            handover, out, registered_name=config["publish"], run_id=None, experiment=config["experiment"]
        )
        console.print(f"registered: {line}")


def _evaluate(config: dict[str, Any]) -> None:
    handover, protocol = _handover(config), config["protocol"]
    out = Path(config["out"]) if config["out"] else _default_out(config, handover, f"evaluation_{protocol['name']}")
    keys = {field.name: config[field.name] for field in fields(EvaluationSettings) if field.name in config}
    settings = EvaluationSettings(**keys | {"protocol": protocol["name"], "attacks": protocol["attacks"]})
    console = Console(highlight=False)
    with _progress("evaluating", console) as progress:
        summary = evaluation.run(handover, _data(config, handover), settings, out, progress)
    console.print(evaluation_report.table(summary))
    for flag in summary["flags"]:
        console.print(f"warning: {flag['name']}: {flag['message']}", style="yellow", markup=False, soft_wrap=True)
    console.print(
        f"card {out / evaluation.CARD}, bars {out / evaluation.BARS}, rows {out / evaluation.TABLE}", soft_wrap=True
    )
    if config["version"]:
        from registry.annotate import annotate

        version = annotate(config["version"], evaluation_report.tags(summary), evaluation_report.metrics(summary))
        console.print(f"tags of {version.uri}: attacked_acc.{protocol['name']}.*, flags.{protocol['name']}")


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
    out = Path(config["out"]) if config["out"] else _default_out(config, handover, "features")
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


def _default_out(config: dict[str, Any], handover: Path, name: str = "certificate") -> Path:
    if config["version"]:
        raise UserError("results of a published version go to a folder of yours; add out=DIR")
    return handover.parent / name


def _data(config: dict[str, Any], handover: Path) -> DataConfig:
    if config.get("data"):
        return DataConfig(**config["data"])
    saved = zoo.handover.read_config(handover)
    if "data" not in saved:
        raise UserError(f"the config of {handover} names no data; add data=NAME data.root=FOLDER")
    return DataConfig(**saved["data"])


def _settings(config: dict[str, Any]) -> StageSettings:
    chosen = {field.name: config[field.name] for field in fields(StageSettings)}
    return StageSettings(**chosen | {"eps": tuple(config["eps"]), "attack": AttackConfig(**config["attack"])})


COMMANDS = {"certify": _certify, "evaluate": _evaluate, "analyse": _analyse, "features": _features}

if __name__ == "__main__":
    main(sys.argv[1:])
