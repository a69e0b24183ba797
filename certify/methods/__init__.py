"""Certification methods by name."""

from collections.abc import Callable

from torch import nn

from certify.methods.adjoint import Adjoint
from certify.methods.best import Best
from certify.methods.certificate import Certifier
from certify.methods.crown import Crown
from certify.methods.lofast import LocalLoFAST, LoFAST

METHODS: dict[str, Callable[[nn.Module], Certifier]] = {
    "lofast": LoFAST,
    "lofast_local": LocalLoFAST,
    "adjoint": Adjoint,
    "crown": Crown,
    "best": Best,
}
