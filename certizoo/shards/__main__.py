"""Look at images, write or list shards: `certizoo shards inspect|folder|text|digits|torchvision|index`."""

import argparse
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.logging import RichHandler
from rich.table import Table

from certizoo import UserError
from certizoo.config.schema import Count, Ge, Le, Whole, argument, as_path
from certizoo.errors import one_line_errors
from certizoo.progress import progress_bar
from certizoo.shards.format import manifest, tokens
from certizoo.shards.format.config import require_name
from certizoo.shards.format.tar import ENDINGS
from certizoo.shards.writing import inspect, sources
from certizoo.shards.writing.sentences import Sentences
from certizoo.shards.writing.write import write
from certizoo.text import plain

console = Console(stderr=True, markup=False)
Words = Annotated[int, Ge(3), Le(tokens.MOST)]


def digits(args: argparse.Namespace) -> None:
    for split, source in sources.digits(args.seed).items():
        path = write(source, args.root, name="digits", split=split, seed=args.seed, per_shard=200, overwrite=True)
    console.print(f"wrote {path}")


def folder(args: argparse.Namespace) -> None:
    source = sources.Folder(args.source, args.only)
    path = _written(source, args, resize=args.resize, class_names=source.classes)
    console.print(f"wrote {len(source)} samples of {len(source.classes)} classes, listed in {path}")


def text(args: argparse.Namespace) -> None:
    source = Sentences(args.source, args.sentence, args.label)
    path = _written(source, args)
    console.print(f"wrote {len(source)} sentences, listed in {path}")
    if args.split == "train":
        words = path.with_name(f"{args.name}{tokens.SUFFIX}")
        count = tokens.train((sentence for sentence, _ in source), words, args.vocabulary)
        console.print(f"wrote the tokeniser of {count} words {words}")


def _written(source: Sequence[tuple[Any, int]], args: argparse.Namespace, **more: Any) -> Path:
    """Write one split of a source; return the manifest's path."""
    given = {name: getattr(args, name) for name in ("name", "split", "seed", "per_shard", "overwrite")}
    with progress_bar(f"{args.name}-{args.split}", console) as progress:
        return write(source, args.root, **given, **more, progress=progress)


def inspect_folder(args: argparse.Namespace) -> None:
    found = inspect.inspect(args.source, every=args.decode)
    inspect.save(found, args.sheet)
    table = Table("label", "class", "images")
    for label, (name, count) in enumerate(zip(found.classes, found.counts, strict=True)):
        table.add_row(str(label), plain(name), str(count))
    console.print(table)
    for warning in found.warnings:
        console.print(f"warning: {plain(warning)}", soft_wrap=True)
    console.print(f"{sum(found.counts)} images; samples of every class are in {args.sheet}", soft_wrap=True)


def torchvision(args: argparse.Namespace) -> None:
    name = args.name or args.dataset.lower()
    for split in ("train", "test"):
        source = sources.torchvision_set(args.dataset, split, args.download_to or args.root / "download")
        args.name, args.split, args.per_shard = name, split, 1000
        path = _written(source, args, class_names=list(getattr(source, "classes", [])) or None)
    console.print(f"wrote {path}")


def index(args: argparse.Namespace) -> None:
    pattern = f"{args.name}-*" if args.name else "*"
    path_of_manifest = args.root / (f"{args.name}.json" if args.name else manifest.GENERAL)
    paths = sorted(path for ending in ENDINGS for path in args.root.glob(pattern + ending))
    if not paths:
        raise UserError(f"there are no shards {args.root / pattern}{ENDINGS[0]}; give the folder that holds them")
    infos, keys = [], manifest.Keys()
    with progress_bar("index", console) as progress:
        for done, path in enumerate(paths, start=1):
            info = manifest.scan(path, decoded=args.decode, keys=keys)
            infos.append(replace(info, sha256=manifest.sha256_of(path), blocks=manifest.blocks_of(path)))
            progress(done, len(paths))
    manifest.save(path_of_manifest, infos)
    console.print(f"listed {len(infos)} shards, {sum(i.samples for i in infos)} samples in {path_of_manifest}")


def parser() -> argparse.ArgumentParser:
    main = argparse.ArgumentParser(prog="certizoo shards", description=__doc__)
    commands = main.add_subparsers(required=True)
    make_digits = commands.add_parser("digits", help="scikit-learn's handwritten digits (no download)")
    make_digits.set_defaults(run=digits)
    look = commands.add_parser("inspect", help="show a folder's classes, samples and faults before it is written")
    look.set_defaults(run=inspect_folder)
    look.add_argument("source", type=as_path, help="a folder with a subfolder of images per class")
    look.add_argument("--sheet", type=as_path, default=Path("contact_sheet.png"), help="default: contact_sheet.png")
    look.add_argument("--decode", action="store_true", help="decode every image, not the samples alone")
    make_folder = commands.add_parser("folder", help="a folder with a subfolder of images per class")
    make_folder.add_argument("source", type=as_path)
    make_folder.set_defaults(run=folder)
    make_text = commands.add_parser("text", help="a TSV file of sentences and labels; --split train makes a tokeniser")
    make_text.add_argument("source", type=as_path)
    make_text.set_defaults(run=text)
    make_torchvision = commands.add_parser("torchvision", help="a data set that torchvision downloads")
    make_torchvision.add_argument("dataset", choices=sources.TORCHVISION_SETS)
    make_torchvision.set_defaults(run=torchvision)
    make_index = commands.add_parser("index", help="write the manifest of existing shards")
    make_index.set_defaults(run=index)
    for command in (make_digits, make_folder, make_text, make_torchvision, make_index):
        command.add_argument("root", type=as_path, help="folder of the shards")
    for command in (make_digits, make_folder, make_text, make_torchvision):
        command.add_argument("--seed", type=argument(Whole), default=0, help="seed of the order of the samples")
    for command in (make_folder, make_text, make_torchvision):
        command.add_argument("--overwrite", action="store_true", help="replace shards of this name and split")
    for command in (make_folder, make_text):
        command.add_argument("--name", required=True)
        command.add_argument("--split", required=True, choices=("train", "test"))
        command.add_argument("--per-shard", type=argument(Count), default=1000)
    make_text.add_argument("--sentence", default="sentence", help="column of the sentences; default: sentence")
    make_text.add_argument("--label", default="label", help="column of the labels, 0, 1, ...; default: label")
    make_text.add_argument(
        "--vocabulary", type=argument(Words), default=tokens.MOST, help="most words of the tokeniser; default: 65536"
    )
    make_folder.add_argument("--resize", type=argument(Count), help="shrink images with a longer short side (JPEG 95)")
    make_folder.add_argument("--only", type=as_path, help="text file that lists the images to take, one per line")
    make_torchvision.add_argument("--name", help="default: the data set's, in lower case")
    make_torchvision.add_argument("--download-to", type=as_path, help="default: ROOT/download")
    make_index.add_argument("--name", help="list NAME-*.tar in NAME.json; default: *.tar in manifest.json")
    make_index.add_argument("--decode", action="store_true", help="also decode every image")
    return main


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[RichHandler(console=console)])
    args = parser().parse_args(argv)
    if getattr(args, "name", None) is not None:  # before a download or a walk over the images
        require_name(args.name, "--name")
    args.run(args)


if __name__ == "__main__":
    main()
