"""Primitive operations as modules with rules: what a captured model is rebuilt from, and torch's layers for conv nets.

`PRIMITIVES` are the types registered here; tests/zoo/primitives attacks every one of them.
"""

from torch import nn

from zoo.primitives import (
    activations,
    branches,
    diagonal,
    folded,
    gates,
    groups,
    jumps,
    moves,
    pooling,
    softmax,
    sorting,
)

PRIMITIVES: tuple[type[nn.Module], ...] = (
    *activations.KINDS,
    *branches.KINDS,
    *diagonal.KINDS,
    *folded.KINDS,
    *gates.KINDS,
    *groups.KINDS,
    *jumps.KINDS,
    *moves.KINDS,
    *pooling.KINDS,
    *softmax.KINDS,
    *sorting.KINDS,
)
