"""Command line of the zoo: `python -m zoo [PATTERN]`, `... show NAME`, `import`, `export`, `push`."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import yaml
from rich.console import Console
from rich.progress import track
from rich.table import Table

from certizoo import UserError
from certizoo.config.schema import Source, argument, as_path
from certizoo.errors import one_line_errors
from certizoo.text import written
from zoo import handover
from zoo.export import FORMATS, export_handover
from zoo.importing import import_checkpoint
from zoo.models import overview
from zoo.models.factory import model_options
from zoo.weights.table import entries

COMMANDS = ("list", "show", "import", "export", "push")


def _console() -> Console:
    return Console(markup=False, width=None if sys.stdout.isatty() else 160)


def list_models(args: argparse.Namespace) -> None:
    """Print a table of the models."""
    names = overview.matching(args.pattern)
    progress = track(names, "measuring", console=Console(stderr=True, markup=False), transient=True)
    rows = list(map(overview.summarize, progress) if args.measure else map(overview.summary, names))
    if args.format == "table":
        _console().print(overview.table(rows))
        return
    records = [row.record() for row in rows]
    sys.stdout.write(written(records[0], records, args.format))


def show(args: argparse.Namespace) -> None:
    """Print options, layers and rules of one model."""
    overrides = _overrides(args.set)
    row = overview.summarize(args.name, **overrides)
    said = model_options(args.name, **overrides)
    backbone = f"{said['backbone']}{' with gated positions' if said.get('gpsa_layers') else ''}"
    options = Table("option", "value")
    for key, value in said.items():
        options.add_row(key, str(value))
    console = _console()
    tokens = "" if row.tokens is None else f", {row.tokens} tokens"
    size = f"{row.parameters:,} parameters, {row.macs / 1e9:.3g} GMACs for one image"
    console.print(f"{row.name}: {row.attention} attention, {backbone}, {size}{tokens}", highlight=False)
    console.print(options)
    console.print(overview.layer_tree(args.name, **overrides), markup=False)
    console.print(overview.rule_table(args.name, **overrides))
    for method, reason in (("lofast", row.lofast), ("adjoint", row.adjoint)):
        console.print(f"{method}: {f'no: {reason}' if reason else 'yes'}", markup=False, soft_wrap=True)
    weights = entries()[args.name].words() if args.name in entries() else "none published"
    console.print(f"weights: {weights}", markup=False, soft_wrap=True, highlight=False)


def import_weights(args: argparse.Namespace) -> None:
    """Write weights of other programs as a hand-over, and print how its logits compare."""
    said = import_checkpoint(args.checkpoint, args.model, args.out, _overrides(args.set), args.ema)
    _console().print(said, soft_wrap=True, highlight=False)


def export(args: argparse.Namespace) -> None:
    """Write the model of a hand-over as a file for other programs."""
    export_handover(handover.folder_of(args.handover), args.out, args.format)


def push(args: argparse.Namespace) -> None:
    """Publish the weights of a name on the hub, and print their address with its digest."""
    from zoo.hub import push as to_hub

    sys.stdout.write(f"{to_hub(args.name, args.place)}\n")


def _overrides(assignments: Sequence[str]) -> dict[str, Any]:
    """Parse 'depth=2' or 'attention={name: dp, v_cap: 1}': values are YAML, as in the configuration files."""
    found = {}
    for text in assignments:
        option, equals, value = text.partition("=")
        if not equals:
            raise UserError(f"{text!r} sets nothing; write --set option=value")
        try:
            found[option] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise UserError(
                f"the value of {text!r} is not valid YAML; quote it as in the configuration files"
            ) from None
    return found


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m zoo", description="The models of the zoo.")
    commands = top.add_subparsers(required=True)
    listing = commands.add_parser("list", help="table of all models (the default command)")
    listing.add_argument("pattern", nargs="?", default="*", metavar="PATTERN", help="such as 'l2_*'")
    listing.add_argument("--format", choices=("table", "csv", "json"), default="table")
    listing.add_argument("--measure", action="store_true", help="build each model instead of reading stored figures")
    listing.set_defaults(action=list_models)
    showing = commands.add_parser("show", help="options, layers and rules of one model")
    showing.add_argument("name", metavar="NAME")
    showing.add_argument("--set", nargs="+", action="extend", default=[], metavar="OPTION=VALUE")
    showing.set_defaults(action=show)
    importing = commands.add_parser(
        "import", help="weights of timm, torchvision, Hugging Face, Lightning, ... as a hand-over"
    )
    importing.add_argument(
        "checkpoint", type=argument(Source), metavar="CHECKPOINT", help="file, timm tag or URL#sha256=HEX"
    )
    importing.add_argument("--model", metavar="NAME", required=True, help="model of the zoo, with the same sizes")
    importing.add_argument(
        "--out", metavar="DIR", type=as_path, required=True, help="folder to write, such as runs/NAME/handover"
    )
    importing.add_argument("--set", nargs="+", action="extend", default=[], metavar="OPTION=VALUE")
    importing.add_argument("--ema", action="store_true", help="the averaged weights of a training checkpoint")
    importing.set_defaults(action=import_weights)
    exporting = commands.add_parser("export", help="the model of a hand-over as a file for other programs")
    exporting.add_argument(
        "handover", metavar="HANDOVER", type=as_path, help="folder that training wrote, or its run: runs/NAME"
    )
    exporting.add_argument("out", metavar="OUT", type=as_path, help="file to write")
    exporting.add_argument("--format", choices=tuple(FORMATS), required=True)
    exporting.set_defaults(action=export)
    pushing = commands.add_parser("push", help="published weights, with a model card, as a repository of the hub")
    pushing.add_argument("name", metavar="NAME", help="model with weights: `python -m zoo show NAME`")
    pushing.add_argument("place", metavar="hf-hub:OWNER/REPOSITORY")
    pushing.set_defaults(action=push)
    return top


@one_line_errors
def main(argv: Sequence[str] | None = None) -> None:
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] not in (*COMMANDS, "-h", "--help"):
        words.insert(0, "list")
    args = parser().parse_args(words)
    args.action(args)


if __name__ == "__main__":
    main()
