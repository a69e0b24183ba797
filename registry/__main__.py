"""`python -m registry list | show | compare | promote | pull | sync | ui`: the registry from the command line."""

import argparse
import logging
import sys
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown

from certizoo import UserError
from certizoo.errors import one_line_errors
from registry import browse, publish, spool, store, tables, ui
from registry.select import select

REFERENCE = "NAME@ALIAS or NAME/VERSION"


def list_versions(args: argparse.Namespace) -> None:
    """A table of versions with what is certified of each."""
    found = select(browse.versions(args.name, args.uri), args.where, args.sort)
    console().print(tables.versions(found))


def show(args: argparse.Namespace) -> None:
    """Tags and model card of one version."""
    version = browse.find(args.reference, args.uri)
    out = console()
    out.print(tables.tags(version))
    out.print(f"run {version.run_id}, created {version.created:%Y-%m-%d %H:%M} UTC\n", highlight=False)
    out.print(Markdown(version.description))


def compare(args: argparse.Namespace) -> None:
    """The tags of several versions side by side."""
    console().print(tables.comparison([browse.find(reference, args.uri) for reference in args.references]))


def promote(args: argparse.Namespace) -> None:
    """Give a version an alias."""
    version = browse.promote(args.reference, args.alias, args.uri)
    sys.stdout.write(f"{version.name}/{version.version} is {' '.join('@' + alias for alias in version.aliases)}\n")


def pull(args: argparse.Namespace) -> None:
    """Copy a version's files."""
    sys.stdout.write(f"{browse.pull(args.reference, args.to, args.uri)}\n")


def console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 200)


def sync(args: argparse.Namespace) -> None:
    """Send the spools of run folders."""
    for folder in args.run_dirs:
        if not folder.is_dir():
            raise UserError(f"{folder} is no folder; give the run folders whose spools are to be sent")
    folders = args.run_dirs or run_folders(Path("runs"))
    waiting = [path for path in folders if spool.waiting(path) or (path / publish.SPOOL).is_file()]
    for folder in waiting:
        if spool.waiting(folder):
            sys.stdout.write(f"{folder}: run {spool.sync(folder, args.uri)} sent\n")
        published = publish.sync(folder, args.uri)
        if published:
            sys.stdout.write(f"{folder}: published {published.uri}{' @champion' * published.champion}\n")
    if not waiting:
        sys.stdout.write("nothing waits to be sent\n")


def run_folders(root: Path) -> list[Path]:
    """Those with a spool, of trials too."""
    found = {path.parent for name in (spool.SPOOL, publish.SPOOL) for path in root.rglob(name)}
    return sorted(found)


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

    listing = add("list", list_versions, "table of published versions")
    listing.add_argument("name", nargs="?", help="of a model (default: all)")
    listing.add_argument("--sort", metavar="KEY", help="best first: a tag, such as certified_acc.0.141")
    listing.add_argument("--where", metavar="CONDITION", action="append", default=[], help="dataset=cifar10, "
        "certified_acc.0.1>=0.5; also != and <=; given again: all must hold")  # fmt: skip
    add("show", show, "tags and card of a version").add_argument("reference", help=REFERENCE)
    comparing = add("compare", compare, "tags of versions side by side")
    comparing.add_argument("references", nargs="+", help=REFERENCE)
    promoting = add("promote", promote, "give a version an alias")
    promoting.add_argument("reference", help=REFERENCE)
    promoting.add_argument("--alias", default="champion", help="default: %(default)s")
    pulling = add("pull", pull, "copy a version's files: weights, configuration, certificate, report")
    pulling.add_argument("reference", help=REFERENCE)
    pulling.add_argument("to", type=Path, metavar="FOLDER", help="new or empty")
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
