"""The command `certizoo explain MODEL`: certify/explanation.py on a model by name, hand-over or function."""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from certify.explanation import explain
from certizoo.config.schema import Count, argument, as_path
from certizoo.errors import one_line_errors
from certizoo.nearest import unknown
from zoo import user_models


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="certizoo explain", description="Layers of a model: rules, norms, shares.")
    top.add_argument(
        "model",
        metavar="MODEL",
        help="a name of the zoo or of timm, a hand-over, or MODULE:FUNCTION that makes one",
    )
    top.add_argument("--img-size", type=argument(Count), help="side of the square images (default: the model's)")
    top.add_argument("--weights", type=as_path, metavar="FILE", help="a .safetensors file with the model's weights")
    top.add_argument("--images", type=argument(Count), default=2, metavar="N", help="random images (default: 2)")
    return top


@one_line_errors
def main(argv: Sequence[str] | None = None) -> None:
    """Print the table of one model."""
    args = parser().parse_args(argv)
    model, size, chans = _model(args.model, args.img_size)
    if args.weights is not None:
        from zoo.weights import files

        model.load_state_dict(files.read(args.weights).original)
    images = torch.rand(args.images, chans, size, size, generator=torch.Generator().manual_seed(0))
    sys.stdout.write(f"{explain(model.eval(), images, nonce='explain')}\n")


def _model(name: str, size: int | None) -> tuple[nn.Module, int, int]:
    """Return a model, the side of its images and their channels. Raises UserError for an unknown name."""
    import timm

    import zoo

    torch.manual_seed(0)
    if Path(name).is_dir():
        found, config = zoo.handover.load(Path(name))
        channels, own, _ = zoo.input_size(config["model"])
        return found, size or own, channels
    if user_models.is_function(name):
        user_models.trust(name)
        return user_models.from_function(name), size or 32, 3
    if name not in timm.list_models():  # those of the zoo are among them
        raise unknown("model", name, [*zoo.list_models(), *timm.list_models()])
    make = partial[Any](timm.create_model, name)
    try:
        model: Any = make() if size is None else make(img_size=size)
    except TypeError:  # conv nets take any size
        model = make()
    return model, size or int(model.pretrained_cfg["input_size"][-1]), int(model.pretrained_cfg["input_size"][0])


if __name__ == "__main__":
    main()
