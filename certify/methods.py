"""Certification methods by name."""

from collections.abc import Callable

from torch import nn

from certify.adjoint import Adjoint
from certify.best import Best
from certify.certificate import Certifier
from certify.crown import Crown
from certify.lofast import LocalLoFAST, LoFAST

METHODS: dict[str, Callable[[nn.Module], Certifier]] = {
    "lofast": LoFAST,
    "lofast_local": LocalLoFAST,
    "adjoint": Adjoint,
    "crown": Crown,
    "best": Best,
}
