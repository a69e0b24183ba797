"""Links of a chain that are not modules: residual sums, and affine maps such as pooling. See `Link` in rule_table.py.

A block is a list of links. Its rules of first and second order and its rounding follow from them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from zoo.bounds.contracts import Bound, Layer, Node, Precision, Rounding
from zoo.bounds.curvature import affine_expansion, composition, nodes_of, residual_expansion
from zoo.bounds.first_order import Unmeasured, added, chain, layer_of, parts_of, residual, residual_layer_of
from zoo.bounds.rounding import NO_BOUND, residual_rounding, roundings_of
from zoo.bounds.rule_table import Link, NoRule, together


class Residual:
    """x + branch(x), where branch is the composition of these modules and links.

    For a branch of one module that has a rule for x + module(x), the sum is measured as one. To second order a residual
    sum is one node, because J = I + J_branch has one norm.

    `first_order`: give the node its first-order rule too. ||J|| r + beta(r) is as good where it matters, and a rule
    that measures I + branch again, as zeta does, costs more than everything else. Inside another branch it is measured.
    """

    def __init__(self, *branch: nn.Module | Link, first_order: bool = False) -> None:
        self.branch, self.first_order = branch, first_order

    def __call__(self, x: Tensor) -> Tensor:
        y = x
        for part in self.branch:
            y = part(y)
        return added(x, y)

    def layer(self, local: bool) -> Layer:
        """Return the first-order rule: see `Link`."""
        if len(self.branch) == 1:
            return residual_layer_of(self.branch[0], local=local)
        return residual(chain(together(partial(layer_of, local=local), self.branch)))

    def nodes(self) -> list[Node]:
        """Return the second-order nodes: see `Link`."""
        branch = [node for nodes in together(nodes_of, self.branch) for node in nodes]
        names = tuple(name for layer, _ in branch for name in parts_of(layer))
        measured = partial(self.layer, local=True)
        layer = measured() if self.first_order else Unmeasured(self._unmeasured, names, measured)
        return [(layer, residual_expansion(composition(branch)))]

    def roundings(self, precision: Precision) -> list[Rounding]:
        """Return one rounding per node: see `Link`."""
        branch = [rounding for part in self.branch for rounding in roundings_of(part, precision)]
        return [residual_rounding(branch, precision)]

    def _unmeasured(self, x: Tensor) -> tuple[Tensor, Bound]:
        return self(x), lambda r: torch.where(r > 0, torch.inf, torch.zeros_like(r))


@dataclass(frozen=True)
class Affine:
    """A part of `module` that is an affine map.

    It has the map itself, the `rule` of its norm, J J^T where that is cheap (as in `Expansion`), and its rounding where
    there is a bound.
    """

    module: nn.Module
    map: Callable[[Tensor], Tensor]
    rule: Callable[[], Layer]
    gram: Callable[[], Callable[[Tensor], Tensor]] | None = None
    rounding: Callable[[Precision], Rounding] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return self.map(x)

    def layer(self, local: bool) -> Layer:
        """Return the first-order rule: see `Link`."""
        return self.rule()

    def nodes(self) -> list[Node]:
        """Return the second-order nodes: see `Link`."""
        layer = self.rule()
        return [(layer, affine_expansion(self.map, layer, None if self.gram is None else self.gram()))]

    def roundings(self, precision: Precision) -> list[Rounding]:
        """Return one rounding per node: see `Link`."""
        if self.rounding is None:
            raise NoRule(self.module, NO_BOUND)
        return [self.rounding(precision)]
