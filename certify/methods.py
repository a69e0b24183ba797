"""Certification methods by name."""

from collections.abc import Callable

from torch import nn

from certify.adjoint import Adjoint
from certify.certificate import Certifier
from certify.lofast import LoFAST

METHODS: dict[str, Callable[[nn.Module], Certifier]] = {"lofast": LoFAST, "adjoint": Adjoint}
