"""Certification methods by name."""

from collections.abc import Callable

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from certify.adjoint.adjoint import Adjoint
from certify.image.image import Image
from certify.linear.linear import Linear
from certify.methods.best import Best
from certify.methods.crown import Crown
from certify.methods.lofast import LocalLoFAST, LoFAST
from certify.shared.bake import Model
from certify.shared.certificate import Certifier
from certify.taylor.taylor import Taylor
from certizoo.attacks.loop import probing
from zoo.bounds.rule_table import has_rules

Method = Callable[[nn.Module | Model, str | None, str], Certifier]


def _without_chance(method: Callable[[nn.Module | Model, str], Certifier]) -> Method:
    return lambda model, nonce, norm: method(model, norm)


# name -> certifier of (model, the nonce of its random starts or None to draw one, the norm of the balls)
METHODS: dict[str, Method] = {
    "lofast": _without_chance(LoFAST),
    "lofast_local": _without_chance(LocalLoFAST),
    "adjoint": Adjoint,
    "image": Image,
    "taylor": Taylor,
    "linear": _without_chance(Linear),
    "crown": _without_chance(Crown),
    "best": Best,
}

# The default: the strongest method that a model can afford. Results record which method it was.
#
#     best       models with rules of their own and few parameters: seconds an image
#     adjoint    any other model whose forward pass is cheap: a minute an image at most, by benchmarks/bench_models.py
#     lofast     the rest, such as a ViT at 224 pixels, where the others take an hour; radii behind many layers are tiny
AUTO = "auto"
NAMES = (AUTO, *METHODS)  # all that a user may ask for
FEW = 2**20  # parameters
CHEAP = 2**29  # products of a forward pass at one image


def named(method: str, model: nn.Module, shape: tuple[int, ...] | None = None) -> str:
    """Return the method itself, or the one that `auto` means for this model and images of this shape (C, H, W).

    Without a shape it is that of the zoo's models.
    """
    if method != AUTO:
        return method
    weights = list(model.parameters()) if isinstance(model, nn.Module) else []  # the method refuses other objects
    if sum(weight.numel() for weight in weights) < FEW and (not weights or has_rules(model)):
        return "best"
    shape = shape or image_shape(model)
    return "adjoint" if shape and products(model, shape) <= CHEAP else "lofast"


def image_shape(model: nn.Module) -> tuple[int, ...] | None:
    """Return the shape of the images that a model of the zoo takes."""
    embed = getattr(model, "patch_embed", model)
    side, kernels = getattr(embed, "img_size", None), (w for w in model.parameters() if w.ndim == 4)
    kernel = next(kernels, None)
    if side is None or kernel is None:
        return None
    return (kernel.shape[1], *((side, side) if isinstance(side, int) else side))


def products(model: nn.Module, shape: tuple[int, ...]) -> int:
    """Return the number of products of a forward pass at one image; 0 if there is none, which the method refuses."""
    weight = next(model.parameters())
    try:
        with probing(model), torch.no_grad(), FlopCounterMode(display=False) as counter:
            model(weight.new_zeros(1, *shape))
    except (RuntimeError, AssertionError, IndexError, ValueError, TypeError):
        return 0
    return int(counter.get_total_flops()) // 2
