"""Certification methods by name."""

from collections.abc import Callable

from torch import nn

from certify.adjoint.adjoint import Adjoint
from certify.image.image import Image
from certify.methods.best import Best
from certify.methods.crown import Crown
from certify.methods.lofast import LocalLoFAST, LoFAST
from certify.shared.bake import Model
from certify.shared.certificate import Certifier

Method = Callable[[nn.Module | Model, str | None, str], Certifier]


def _without_chance(method: Callable[[nn.Module | Model, str], Certifier]) -> Method:
    return lambda model, nonce, norm: method(model, norm)


# name -> certifier of (model, the nonce of its random starts or None to draw one, the norm of the balls)
METHODS: dict[str, Method] = {
    "lofast": _without_chance(LoFAST),
    "lofast_local": _without_chance(LocalLoFAST),
    "adjoint": Adjoint,
    "image": Image,
    "crown": _without_chance(Crown),
    "best": Best,
}

# The default: the strongest method that a model can afford. `best` takes about a second per image for a small model and
# minutes for a ViT at 224 pixels, and every training certifies hundreds. Results record which method it was.
AUTO = "auto"
NAMES = (AUTO, *METHODS)  # all that a user may ask for
AFFORDABLE = 2**20  # parameters


def named(method: str, model: nn.Module) -> str:
    """Return the method itself, or the one that `auto` means for this model."""
    if method != AUTO:
        return method
    weights = model.parameters() if isinstance(model, nn.Module) else ()  # the method itself refuses other objects
    return "best" if sum(weight.numel() for weight in weights) < AFFORDABLE else "lofast"
