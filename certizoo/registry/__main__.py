"""`certizoo registry list | show | compare | promote | pull | sync | ui`: the registry from the command line."""

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from certizoo import UserError
from certizoo.config.schema import Count, Port, argument, as_path
from certizoo.errors import one_line_errors
from certizoo.registry import browse, listing, tables
from certizoo.registry.server import store, ui
from certizoo.registry.tracking import run_folder, runs
from certizoo.registry.versions import publish
from certizoo.text import plain, written

REFERENCE = "NAME@ALIAS or NAME/VERSION"


def list_versions(args: argparse.Namespace) -> None:
    """Print versions and their certified shares."""
    found, more = listing.listed(args.name, args.where, args.sort, args.limit, args.uri)
    if args.format == "table":
        console().print(tables.versions(found))
    else:
        keys = (*tables.NAMES, *tables.columns(found))
        sys.stdout.write(written(keys, tables.records(found), args.format))
    if more:
        note = f"the {'best' if args.sort else 'newest'} {args.limit}; --limit N shows N of them"
        sys.stderr.write(f"{note}\n")


def show(args: argparse.Namespace) -> None:
    """Print tags and model card of one version."""
    version = browse.find(args.reference, args.uri)
    out = console()
    out.print(tables.tags(version))
    say(f"run {version.run_id}, created {version.created:%Y-%m-%d %H:%M} UTC")
    out.print(tables.card(version))


def compare(args: argparse.Namespace) -> None:
    """Print the tags of several versions side by side."""
    console().print(tables.comparison([browse.find(reference, args.uri) for reference in args.references]))


def promote(args: argparse.Namespace) -> None:
    """Give a version an alias."""
    version = browse.promote(args.reference, args.alias, args.uri, force=args.force)
    say(f"{version.name}/{version.version} is {' '.join('@' + alias for alias in version.aliases)}")


def pull(args: argparse.Namespace) -> None:
    """Copy a version's files."""
    say(str(browse.pull(args.reference, args.to, args.uri)))


def say(text: str) -> None:
    """Print a line that may quote names from outside."""
    sys.stdout.write(f"{plain(text)}\n")


def console() -> Console:
    return Console(markup=False, width=None if sys.stdout.isatty() else 200)


def sync(args: argparse.Namespace) -> None:
    """Send what MLflow lacks of run folders: rows, files, status, and versions that wait."""
    for folder in args.run_dirs:
        if not folder.is_dir():
            raise UserError(f"{folder} is not a folder; give the run folders that are to be sent")
    folders = args.run_dirs or run_folder.below(Path("runs"))
    waiting = [path for path in folders if runs.waiting(path) or publish.waiting(path)]
    target = store.public(store.resolve_uri(args.uri))
    for folder in waiting:
        meant = {store.public(left.uri) for left in (runs.waiting(folder), publish.waiting(folder)) if left} - {target}
        if meant:
            say(f"{folder}: meant for {', '.join(meant)}, sent to {target}")
        if runs.waiting(folder):
            say(f"{folder}: run {runs.sync(folder, args.uri)} sent")
        published = publish.sync(folder, args.uri)
        if published:
            say(f"{folder}: published {published.uri}{' @champion' * published.champion}")
    if not waiting:
        say("nothing to send")


def serve(args: argparse.Namespace) -> None:
    """Serve the registry to a browser."""
    raise SystemExit(ui.serve(args.uri, args.host, args.port))


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="certizoo registry", description="The registry of certified models.")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--uri", help="tracking URI (default: MLFLOW_TRACKING_URI, else ./mlflow.db)")
    commands = top.add_subparsers(required=True)

    def add(name: str, action: object, text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text, parents=[common])
        command.set_defaults(action=action)
        return command

    shown = add("list", list_versions, "table of published versions")
    shown.add_argument("name", nargs="?", help="name of a model (default: all)")
    shown.add_argument("--sort", metavar="KEY", help="sort by a tag, best first, such as certified_acc.0.141")
    shown.add_argument("--where", metavar="CONDITION", action="append", default=[], help="dataset=cifar10, "
        "alias=champion, certified_acc.0.1>=0.5; also != and <=; if repeated, all must hold")  # fmt: skip
    shown.add_argument("--limit", type=argument(Count), default=50, help="most versions shown, the newest or the "
        "best by KEY (default: %(default)s)")  # fmt: skip
    shown.add_argument("--format", choices=("table", "csv", "json"), default="table")
    add("show", show, "tags and card of a version").add_argument("reference", help=REFERENCE)
    comparing = add("compare", compare, "tags of versions side by side")
    comparing.add_argument("references", nargs="+", help=REFERENCE)
    promoting = add("promote", promote, "give a version an alias")
    promoting.add_argument("reference", help=REFERENCE)
    promoting.add_argument("--alias", default="champion", help="default: %(default)s")
    promoting.add_argument(
        "--force", action="store_true", help="make it champion against the rule, until the next promotion"
    )
    pulling = add("pull", pull, "copy a version's files: weights, configuration, certificate, report")
    pulling.add_argument("reference", help=REFERENCE)
    pulling.add_argument("to", type=as_path, metavar="FOLDER", help="new or empty")
    sending = add("sync", sync, "send what was kept while MLflow did not answer")
    sending.add_argument(
        "run_dirs", nargs="*", type=as_path, metavar="RUNDIR", help="run folders (default: all of runs/)"
    )
    serving = add("ui", serve, "open the registry in a browser (mlflow server)")
    serving.add_argument("--host", default="127.0.0.1")
    serving.add_argument("--port", type=argument(Port), default=5000)
    return top


@one_line_errors
def main(argv: Sequence[str] | None = None) -> None:
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    store.use_defaults()
    args = parser().parse_args(argv)
    args.action(args)


if __name__ == "__main__":
    main()
