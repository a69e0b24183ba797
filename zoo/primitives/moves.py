"""Maps that only move entries: reshape, permute, select, flip, pad, repeat, a class token, and any composition of them.

    y_o = x_{index(o)},  or a constant where index(o) < 0,        ||J||^2 = max_i #{o : index(o) = i}

J^T J is diagonal: it counts how often an entry of x occurs in y. Proof: docs/proofs.md#primitives.

Letters: B images, C vectors of each.
"""

import math

import torch
from torch import Tensor, nn

from zoo.arithmetic import OUT, gamma
from zoo.bounds.contracts import Bound, Expand, Expansion, Layer, Precision, Rounded, Rounding
from zoo.bounds.hypotheses import Shapes
from zoo.bounds.rounding import exact
from zoo.bounds.rule_table import ModuleRules, NoRule, register


class Move(nn.Module):
    """(B, *given) -> (B, *index.shape), entry by entry from the flat index into one image.

    A negative index takes the entry of `constant` at the same place.
    """

    index: Tensor
    constant: Tensor

    def __init__(self, index: Tensor, given: tuple[int, ...], constant: Tensor | None = None) -> None:
        super().__init__()
        self.given, self.shape = tuple(given), tuple(index.shape)
        self.register_buffer("index", index.flatten().clone())
        constants = torch.zeros(len(self.index)) if constant is None else constant.flatten().clone()
        self.register_buffer("constant", torch.where(self.index < 0, constants, torch.zeros_like(constants)))

    def forward(self, x: Tensor) -> Tensor:
        """Append one constant an output entry to every image, and choose."""
        size, at = x[0].numel(), torch.arange(len(self.index), device=self.index.device)
        with_constants = torch.cat([x.reshape(len(x), -1), self.constant.expand(len(x), -1)], 1)
        return with_constants.index_select(1, torch.where(self.index < 0, size + at, self.index)).view(-1, *self.shape)


class Reshape(nn.Module):
    """(B, *given) -> (B, *shape), in the same order."""

    def __init__(self, given: tuple[int, ...], shape: tuple[int, ...]) -> None:
        super().__init__()
        self.given, self.shape = tuple(given), tuple(shape)

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(len(x), *self.shape)


def counts(module: Move) -> Tensor:
    """Return how often each entry of x occurs in y."""
    size = torch.Size(module.given).numel()
    taken = module.index[module.index >= 0]
    if len(taken) and int(taken.max()) >= size:
        raise NoRule(module, f"its index {int(taken.max())} is beyond the {size} entries of its input")
    return torch.bincount(taken, minlength=size).double()


def _gain(module: Move) -> float:
    """Return the root of the largest count; of a perfect square it is exact."""
    most = int(counts(module).max())
    return math.sqrt(most) * (1.0 if math.isqrt(most) ** 2 == most else OUT)


def _refuse_other(module: Move | Reshape, x: Tensor) -> None:
    if tuple(x.shape[1:]) != module.given:
        raise NoRule(module, f"it was made for inputs of {module.given}, and its input is {tuple(x.shape[1:])}")


def move(module: Move) -> Layer:
    """Return the rule: the norm is the root of the largest count."""
    gain = _gain(module)

    def layer(x: Tensor) -> tuple[Tensor, Bound]:
        _refuse_other(module, x)
        return module(x), lambda r: gain * r

    return layer


def move_expansion(module: Move) -> Expand:
    """Expand the map: J v chooses, J^T g adds up what was chosen several times."""
    layer, most = move(module), float(counts(module).max())
    chosen = (module.index >= 0).nonzero().flatten()
    source, size = module.index[chosen], torch.Size(module.given).numel()

    def push(v: Tensor) -> Tensor:
        flat = v.reshape(*v.shape[:2], -1)
        y = flat.new_zeros(*flat.shape[:2], len(module.index))
        return y.index_copy(2, chosen, flat.index_select(2, source)).view(*v.shape[:2], *module.shape)

    def pull(g: Tensor) -> Tensor:
        flat = g.reshape(*g.shape[:2], -1).index_select(2, chosen)
        return flat.new_zeros(*flat.shape[:2], size).index_add(2, source, flat).view(*g.shape[:2], *module.given)

    def expand(x: Tensor) -> Expansion:
        y, bound = layer(x)
        gain_B = bound(x.new_ones(len(x)))
        rounding_B = gamma(int(most) + 2) * most * torch.ones_like(gain_B) if most > 1 else torch.zeros_like(gain_B)
        return Expansion.without_remainder(
            y=y,
            gain_B=gain_B,
            pull=pull,
            own_push=push,
            rounding_B=rounding_B,
        )

    return expand


def move_rounding(module: Move, precision: Precision) -> Rounding:
    """Return the rounding of copies: r and e may both be repeated."""
    gain = _gain(module)

    def around(x: Tensor) -> Rounded:
        return Rounded(module(x), lambda r: gain * r, lambda r, e: gain * e)

    return around


def move_shapes(module: Move) -> Shapes:
    """Return one index and one constant an entry of the output."""
    return dict.fromkeys(("index", "constant"), (torch.Size(module.shape).numel(),))


def reshape(module: Reshape) -> Layer:
    """Return the rule of an isometry."""

    def layer(x: Tensor) -> tuple[Tensor, Bound]:
        _refuse_other(module, x)
        return module(x), lambda r: r

    return layer


def reshape_expansion(module: Reshape) -> Expand:
    """Expand the isometry."""
    layer = reshape(module)

    def expand(x: Tensor) -> Expansion:
        ones_B = x.new_ones(len(x))
        return Expansion.without_remainder(
            y=layer(x)[0],
            gain_B=ones_B,
            pull=lambda g: g.reshape(*g.shape[:2], *module.given),
            own_push=lambda v: v.reshape(*v.shape[:2], *module.shape),
            rounding_B=0 * ones_B,
        )

    return expand


register(Move, ModuleRules(rule=move, expansion=move_expansion, rounding=move_rounding, shapes=move_shapes))
register(
    Reshape,
    ModuleRules(rule=reshape, expansion=reshape_expansion, rounding=lambda module, precision: exact(module)),
)
KINDS = (Move, Reshape)
