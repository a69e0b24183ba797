"""A sum of branches, f_1(x) + ... + f_n(x): what a graph does between a value and the sum that joins its uses.

    first order   sum_i bound_i(r)          second order   R = sum_i R_i,  J = sum_i J_i,  one norm of the sum

x + f(x) is `Residual` (zoo/bounds/links.py), whose rules are tighter for some f.
"""

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor, nn

from zoo.arithmetic import OUT, U
from zoo.bounds.contracts import Bound, Expand, Expansion, Layer, Node, Precision, Rounding
from zoo.bounds.curvature import composition, ended, identity_expansion, nodes_of
from zoo.bounds.first_order import Step, added, chain, layer_of, parts_of
from zoo.bounds.links import Residual
from zoo.bounds.rounding import NO_BOUND
from zoo.bounds.rule_table import Link, ModuleRules, NoRule, register


class Branches(nn.Module):
    """The sum of what its branches make of one input; an empty `nn.Sequential` is the identity."""

    def __init__(self, *branches: nn.Sequential) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return reduce(added, [branch(x) for branch in self.branches])


class Sum:
    """The link of `Branches`, except for x + f(x), which is a `Residual`."""

    def __init__(self, module: Branches) -> None:
        self.module = module
        self.branches: list[nn.Module] = list(module.branches)

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = self.module(x)
        return y

    def layer(self, local: bool) -> Layer:
        """Return the first-order rule: see `Link`."""
        layers = [chain([layer_of(branch, local=local)]) for branch in self.branches]

        def layer(x: Tensor) -> tuple[Tensor, Bound]:
            found = [one(x) for one in layers]
            y = reduce(added, [y for y, _ in found])
            return y, lambda r: reduce(torch.add, [bound(r) for _, bound in found])

        return Step(layer, tuple(part for one in layers for part in parts_of(one)) or ("sum",))

    def nodes(self) -> list[Node]:
        """Return the second-order nodes: see `Link`."""
        return [(self.layer(local=True), sum_expansion([_branch(branch) for branch in self.branches]))]

    def roundings(self, precision: Precision) -> list[Rounding]:
        """Refuse: see `Link`."""
        raise NoRule(self.module, NO_BOUND)


def _branch(branch: nn.Module) -> Expand:
    nodes = nodes_of(branch)
    return composition(nodes) if nodes else identity_expansion


def sum_expansion(branches: Sequence[Expand]) -> Expand:
    """Expand the sum, two branches at a time."""
    return reduce(_pair, branches)


def _pair(one: Expand, other: Expand) -> Expand:
    """Expand f_1(x) + f_2(x): gains, remainders and roundings add up."""

    def expand(x: Tensor) -> Expansion:
        first, second = one(x), other(x)
        gain_B = (first.gain_B + second.gain_B) * OUT

        def remainder(g: Tensor) -> Bound:
            bounds = first.remainder(g), second.remainder(g)
            return lambda r: bounds[0](r) + bounds[1](r)

        return Expansion(
            y=added(first.y, second.y),
            gain_B=gain_B,
            beta=lambda r: first.beta(r) + second.beta(r),
            remainder=remainder,
            pull=lambda g: first.pull(g) + second.pull(g),
            own_push=lambda v: first.push(v) + second.push(v),
            rounding_B=(first.rounding + second.rounding + 4 * U * gain_B) * OUT,
            branches=(_parts(first, x), _parts(second, x)),
        )

    return expand


def _parts(expansion: Expansion, x: Tensor) -> tuple[Expansion, ...]:
    return () if expansion.y is x else ended(expansion.parts or (expansion,))


def branches_chain(module: Branches) -> list[nn.Module | Link]:
    """Return the residual sum for x + f(x), else the sum."""
    full = [branch for branch in module.branches if len(branch)]  # type: ignore[arg-type]
    if len(module.branches) == 2 and len(full) == 1:
        return [Residual(*full[0])]  # type: ignore[misc]
    return [Sum(module)]


register(Branches, ModuleRules(chain=branches_chain))
KINDS = (Branches,)
