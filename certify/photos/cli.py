"""The commands `python -m certify image PHOTO... model=NAME ...` and `python -m certify serve model=NAME ...`.

Their keys are those of configs/image.yaml and configs/serve.yaml.
"""

import csv
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from certify.photos import photo, picture
from certify.photos.predict import Answer, Asked, Predictor
from certify.photos.samples import sample_of, samples
from certify.photos.server import Place, serve_forever
from certify.rows.arguments import Config, Subject, handover_of, settings_of
from certizoo import UserError
from certizoo.config.schema import PathText, typed_values
from certizoo.files import disk_errors, whole_file

TABLE = "images.csv"


@dataclass(frozen=True)
class ImageKeys(Subject, Asked):
    """configs/image.yaml."""

    files: tuple[PathText, ...] = ()


@dataclass(frozen=True)
class ServeKeys(Subject, Asked, Place):
    """configs/serve.yaml."""


def image(config: Config) -> None:
    """Answer every photograph in words, and with out=FOLDER also as a picture and a row of OUT/images.csv.

    Before a slow method, a quick one answers, in words and as a picture.
    """
    config = typed_values(ImageKeys, config)
    files: Sequence[str] = config["files"]
    if not files:
        names = ", ".join(path.stem for path in samples())
        raise UserError(f"name a photograph: python -m certify image PHOTO.png [MORE...] model=NAME; samples: {names}")
    out = Path(config["out"]) if config["out"] else None
    predict = Predictor(handover_of(config), settings_of(Asked, config), out or Path())
    console = Console(highlight=False, markup=False)
    answers = dict[int, Answer]()
    try:
        for number, name in enumerate(files):
            for answer in predict.answers(photo.read(_file(name), predict.channels, predict.size)):
                answers[number] = answer
                console.print(answer.words(), markup=False, soft_wrap=True)
                if out is not None:
                    with disk_errors("make room, or choose another folder: out=FOLDER"):
                        _write(answers, number, out)
                if answer.method != predict.method:
                    console.print(f"{predict.method} may prove more and takes longer; Ctrl-C keeps this answer.")
    except KeyboardInterrupt:
        raise UserError("stopped; the answers above are valid") from None
    if out is not None:
        console.print(f"pictures and {TABLE} in {out}", markup=False, soft_wrap=True)
    elif len(answers) > 1:
        _table(answers.values(), sys.stdout)


def serve(config: Config) -> None:
    """Serve a page on this machine that answers dropped photographs, until Ctrl-C."""
    config = typed_values(ServeKeys, config)
    place = settings_of(Place, config)
    predict = Predictor(handover_of(config), settings_of(Asked, config), Path())
    console = Console(highlight=False, markup=False)
    serve_forever(predict, place, lambda url: console.print(f"{predict.title}: {url}   (Ctrl-C ends it)", markup=False))


def _file(name: str) -> Path:
    """Return the photograph of this path, else the sample of this name."""
    path = Path(name)
    return path if path.exists() else sample_of(name) or path


def _write(answers: Mapping[int, Answer], number: int, out: Path) -> None:
    """Write the picture of a photograph, and the table of all so far."""
    out.mkdir(parents=True, exist_ok=True)
    stem = re.sub(r"[^A-Za-z0-9_-]", "_", Path(answers[number].photo.name).stem)[:80]
    with whole_file(out / f"{number:04d}_{stem}.png") as part:
        part.write_bytes(picture.picture(answers[number]))
    with whole_file(out / TABLE) as part, part.open("w", newline="") as file:
        _table(answers.values(), file)


def _table(answers: Iterable[Answer], file) -> None:  # type: ignore[no-untyped-def]
    rows = [answer.row() for answer in answers]
    writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
