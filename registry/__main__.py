"""`python -m registry list | show | sync | ui`: the registry from the command line."""

import argparse
import logging
import sys
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown
from rich.table import Table

from certizoo import UserError
from certizoo.errors import one_line_errors
from registry import browse, publish, spool, store, ui

CERTIFIED = "certified_acc."
FACTS = ("dataset", "attention", "penalty", "method", "clean_acc")


def list_versions(args: argparse.Namespace) -> None:
    """A table of versions with what is certified of each."""
    found = browse.versions(args.name, args.uri)
    radii = sorted({tag for v in found for tag in v.tags if tag.startswith(CERTIFIED)}, key=_radius)
    table = Table("name", "version", "alias", *(fact.removesuffix("_acc") for fact in FACTS), *radii)
    for v in found:
        facts = (v.tags.get(tag, "") for tag in (*FACTS, *radii))
        table.add_row(v.name, v.version, " ".join(v.aliases), *facts)
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def _radius(tag: str) -> tuple[float, str]:
    """Sort key: by the number behind the dot, other texts last."""
    try:
        return float(tag.removeprefix(CERTIFIED)), tag
    except ValueError:
        return float("inf"), tag


def show(args: argparse.Namespace) -> None:
    """Tags and model card of one version."""
    version = browse.find(args.reference, args.uri)
    console = Console()
    title = f"{version.name}/{version.version} {' '.join('@' + alias for alias in version.aliases)}"
    table = Table("tag", "value", title=title)
    for tag, value in sorted(version.tags.items()):
        table.add_row(tag, value)
    console.print(table)
    console.print(f"run {version.run_id}, created {version.created:%Y-%m-%d %H:%M} UTC\n", highlight=False)
    console.print(Markdown(version.description))


def sync(args: argparse.Namespace) -> None:
    """Send the spools of run folders."""
    for folder in args.run_dirs:
        if not folder.is_dir():
            raise UserError(f"{folder} is no folder; give the run folders whose spools are to be sent")
    folders = args.run_dirs or sorted(path for path in Path("runs").glob("*") if path.is_dir())
    waiting = [path for path in folders if spool.waiting(path) or (path / publish.SPOOL).is_file()]
    for folder in waiting:
        if spool.waiting(folder):
            sys.stdout.write(f"{folder}: run {spool.sync(folder, args.uri)} sent\n")
        published = publish.sync(folder, args.uri)
        if published:
            sys.stdout.write(f"{folder}: published {published.uri}{' @champion' * published.champion}\n")
    if not waiting:
        sys.stdout.write("nothing waits to be sent\n")


def serve(args: argparse.Namespace) -> None:
    """The registry in a browser."""
    raise SystemExit(ui.serve(args.uri, args.host, args.port))


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m registry", description="The registry of certified models.")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--uri", help="tracking URI (default: MLFLOW_TRACKING_URI, else ./mlflow.db)")
    commands = top.add_subparsers(required=True)

    def add(name: str, action: object, text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text, parents=[common])
        command.set_defaults(action=action)
        return command

    add("list", list_versions, "table of published versions").add_argument("name", nargs="?")
    add("show", show, "tags and card of a version").add_argument("reference", help="NAME@ALIAS or NAME/VERSION")
    sending = add("sync", sync, "send what was kept while MLflow was away")
    sending.add_argument("run_dirs", nargs="*", type=Path, metavar="RUNDIR", help="default: all of runs/")
    serving = add("ui", serve, "open the registry in a browser (mlflow server)")
    serving.add_argument("--host", default="127.0.0.1")
    serving.add_argument("--port", type=int, default=5000)
    return top


@one_line_errors
def main() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    store.use_defaults()
    args = parser().parse_args()
    args.action(args)


if __name__ == "__main__":
    main()
