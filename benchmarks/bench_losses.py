"""Tightness of whole certificates: bound of a margin's loss / loss that an attack finds, for our trained models.

The margin of an image is that over the class whose first order comes closest to using it up. Its loss on the ball is
bounded by the first order alone (which is no bound), with forms (`image`) and with second orders (`taylor`), and
maximised by gradient ascent. The images are the first correct ones of the test set; the function is that in float64.

    python -m benchmarks.bench_losses data.root=SHARDS [--models NAME ...] [--images 5]

Results: benchmarks/results/losses.json. A bound below what ascent finds ends the run with an error.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import zoo
from benchmarks.msvp import first_images
from benchmarks.record import record
from benchmarks.trainings import portable
from certify.taylor.taylor import Taylor, TaylorAnalysis
from certizoo.config.compose import compose_config
from certizoo.shards import DataConfig
from tests.tools.ascent import ascend
from tests.tools.taylor_stages import stage_of

MODELS = ("cert_gpsa_vit_c10", "cert_vit_c10")
SLOWER = ("cert_gpsa_vit_c10_gpu",)  # a minute for each radius and image on one core
EPS = (36, 72, 108)  # of 255
STEPS, STARTS = 100, 3
TRIED = 10  # images read for each correct one that is wanted


@dataclass(frozen=True)
class Loss:
    """The largest loss of one margin: to first order, as two methods bound it, and as ascent finds it."""

    model: str
    image: int
    eps: int
    margin: float
    first: float
    forms: float
    taylor: float
    found: float


def losses(name: str, data: DataConfig, count: int) -> Iterator[Loss]:
    """Iterate over the losses of the first `count` correct images at every eps."""
    model = zoo.create_model(name, pretrained=True).eval()
    images, labels = (batch.split(1) for batch in first_images(model, data, TRIED * count))
    certifier, measured = Taylor(model, nonce="losses"), 0
    for image, one in enumerate(zip(images, labels, strict=True)):
        if measured == count:
            break
        for _, analysis in certifier.analyse(*one).parts:  # none where the image is misclassified
            assert isinstance(analysis, TaylorAnalysis)
            yield from (loss_of(name, image, eps, certifier.baked, analysis) for eps in EPS)
            measured += 1


def loss_of(name: str, image: int, eps: int, baked: nn.Module, analysis: TaylorAnalysis) -> Loss:
    stage = stage_of(analysis, eps / 255)
    here, asked = stage.here, stage._asked(stage.most_B)
    margin_BR = here.clean.margin_BJ.gather(1, here.rivals_BR)
    class_B = here.rivals_BR[:, (margin_BR / here.first(here.rivals_BR.mT).mT).argmin(1)[0]]
    formed = stage._formed_of(class_B[None])
    wanted_B, bound = torch.ones_like(here.clean.correct_B), partial(stage.together, asked=asked)
    alone_B = stage._rivals.alone(class_B, wanted_B, bound)

    def drop(z: Tensor) -> Tensor:
        logits = baked(z)
        return logits[:, class_B[0]] - logits[:, here.clean.label_B[0]]

    found_B = ascend(drop, analysis.images, stage.most_B, STEPS, STARTS) - drop(analysis.images)
    taylor, found = float(alone_B), float(found_B)
    if not found <= taylor * (1 + 1e-9):
        raise AssertionError(f"{name}, image {image}, {eps}/255: ascent finds {found}, the bound is {taylor}")
    margin, first = float(here.clean.margin_BJ[0, class_B]), float(formed.first) * eps / 255
    return Loss(name, image, eps, margin, first, float(bound(formed)), taylor, found)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS + SLOWER, default=MODELS, help="default: the first two")
    parser.add_argument("--images", type=int, default=5, help="correct images of each model (default 5)")
    parser.add_argument("overrides", nargs="*", help="Hydra overrides of the data, such as data.root=SHARDS")
    return parser.parse_intermixed_args()


def main() -> None:
    options = arguments()
    config = compose_config("adv_train", [f"+model={options.models[0]}", "data=cifar10", *options.overrides])
    data, rows = DataConfig(**config["data"]), list[Loss]()
    command = " ".join(["python -m benchmarks.bench_losses", *portable(sys.argv[1:])])
    for name in options.models:
        rows += losses(name, data, options.images)
        record("losses", {"command": command, "steps": STEPS, "starts": STARTS, "rows": [*map(asdict, rows)]})
    Console().print(table(rows))


def table(rows: list[Loss]) -> Table:
    """Return the medians over images, in units of what ascent found."""
    found = Table("model", "eps", "first order", "image", "taylor", "images", box=None)
    for name, eps in dict.fromkeys((row.model, row.eps) for row in rows):
        some = [row for row in rows if (row.model, row.eps) == (name, eps)]
        ratios = (median(getattr(row, kind) / row.found for row in some) for kind in ("first", "forms", "taylor"))
        found.add_row(name, f"{eps}/255", *(f"{ratio:.3g}" for ratio in ratios), str(len(some)))
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
