"""Certification methods by name."""

from collections.abc import Callable, Mapping

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
from certify.shared.ball import L2
from certify.shared.certificate import Certifier
from certify.taylor.taylor import Taylor
from certizoo.attacks.loop import probing
from zoo.bounds.rule_table import NoRule, has_rules
from zoo.models.sentences import embed_of

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


def choices(method: str, model: nn.Module | Model, shape: tuple[int, ...] | None = None) -> tuple[str, ...]:
    """Return the method itself, or what `auto` tries in turn, for images of this shape (C, H, W).

    Without a shape it is the one that the model describes, as those of the zoo and of timm do.
    """
    if method != AUTO:
        return (method,)
    given = model.served if isinstance(model, Model) else model
    if not isinstance(given, nn.Module) or not (count := parameters(given)):  # which the method refuses
        return ("best",)
    if count < FEW and has_rules(given):
        return ("best",)
    shape = shape or image_shape(given)
    return ("adjoint", "lofast") if shape and products(given, shape) <= CHEAP else ("lofast",)


def chosen(
    method: str, model: nn.Module | Model, nonce: str | None, norm: str, shape: tuple[int, ...] | None = None
) -> tuple[str, Certifier]:
    """Return the name and the certifier of the first of the `choices` that takes the model. Raises NoRule if none does.

    A layer may have a first order and no second one.
    """
    *first, last = choices(method, model, shape)
    for name in first:
        try:
            return name, METHODS[name](model, nonce, norm)
        except NoRule:
            continue
    return last, METHODS[last](model, nonce, norm)


def named(method: str, model: nn.Module | Model, shape: tuple[int, ...] | None = None) -> str:
    """Return the name of the method that certifies a model for images of this shape.

    Where `auto` has a choice, the weights are measured to make it.
    """
    names = choices(method, model, shape)
    return names[0] if len(names) == 1 else chosen(method, model, None, L2, shape)[0]


def parameters(model: nn.Module) -> int:
    """Return the number of parameters of the certified function, which reads embedded sentences, not words."""
    embed = embed_of(model)
    words = 0 if embed is None else embed.words.numel()
    return sum(weight.numel() for weight in model.parameters()) - words


def image_shape(model: nn.Module) -> tuple[int, ...] | None:
    """Return the shape of the images that a model takes, as its `pretrained_cfg` says; None if it has none."""
    described = getattr(model, "pretrained_cfg", None)
    size = described.get("input_size") if isinstance(described, Mapping) else None
    return None if size is None else tuple(size)


def products(model: nn.Module, shape: tuple[int, ...]) -> int:
    """Return the number of products of a forward pass at one image; 0 if there is none, which the method refuses."""
    weight = next(model.parameters())
    try:
        with probing(model), torch.no_grad(), FlopCounterMode(display=False) as counter:
            model(weight.new_zeros(1, *shape))
    except (RuntimeError, AssertionError, IndexError, ValueError, TypeError):
        return 0
    return int(counter.get_total_flops()) // 2
