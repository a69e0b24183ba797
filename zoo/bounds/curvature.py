"""Second order: how far a module is from its linearisation at the clean input. The adjoint certificate is made of this.

    f(x + G) = f(x) + J G + R(G),     J = Df(x)

A rule has the same stages as those of `rules.py`:

    curvature(module) -> expand(x_clean) -> Expansion      and its bounds in r as often as the bisection asks

with the promise, for every G with ||G||_F <= r (all tokens and channels of one image together),

    ||J|| <= gain,      ||R(G)||_F <= beta(r),      -<g, R(G)> <= remainder(g)(r),

beta and remainder nondecreasing in r, zero at 0, infinite where nothing is known. Linear modules have R = 0 and need
no rule of their own. The table is keyed by the exact type. Source: MATH.md section 1, MATH-PROOFS.md sections 1 and 2.

Shapes: x (B, ...), float64; g (C, B, ...) for C classes; r (..., B) for beta, (..., C or 1, B) for remainder.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor, nn

from zoo.bounds.rules import Bound, Layer, NoRule, Step, classifier_of, layer_of, local, parts_of


@dataclass(frozen=True)
class Expansion:
    """f around one clean batch. A rule gives J v too where that is cheaper than transposing J^T g, and J J^T v where it
    is cheaper than both."""

    y: Tensor
    gain_B: Tensor
    beta: Bound
    remainder: Callable[[Tensor], Bound]
    pull: Callable[[Tensor], Tensor]  # g (C, B, *y) -> J^T g (C, B, *x)
    own_push: Callable[[Tensor], Tensor] | None = None
    own_gram: Callable[[Tensor], Tensor] | None = None
    linear: bool = False  # no remainder

    def push(self, v: Tensor) -> Tensor:
        """v (C, B, *x) -> J v (C, B, *y)."""
        if self.own_push is not None:
            return self.own_push(v)
        g = self.y.new_zeros(len(v), *self.y.shape)  # any point will do: J^T g is linear in g
        return torch.func.vjp(self.pull, g)[1](v)[0]

    def gram(self, v: Tensor) -> Tensor:
        """v (C, B, *y) -> J J^T v."""
        return self.push(self.pull(v)) if self.own_gram is None else self.own_gram(v)


Expand = Callable[[Tensor], Expansion]
Curvature = Callable[[nn.Module], Expand]
Node = tuple[Layer, Expand]  # one step of the chain of a model: how its radius grows, and its second order

_CURVATURES: dict[type[nn.Module], Curvature] = {}
_LINEAR: set[type[nn.Module]] = set()
_NODES: dict[type[nn.Module], Callable[..., list[Node]]] = {}
_TRUNKS: dict[type[nn.Module], Callable[..., tuple[list[Node], nn.Linear]]] = {}


def curvature(*kinds: type[nn.Module]) -> Callable[[Callable[..., Expand]], Callable[..., Expand]]:
    """Enter the decorated function into the table for these exact types."""

    def enter(function: Callable[..., Expand]) -> Callable[..., Expand]:
        _CURVATURES.update(dict.fromkeys(kinds, function))
        return function

    return enter


def linear(*kinds: type[nn.Module]) -> None:
    """These types are affine in their input: R = 0, and their rule in `rules.py` bounds J."""
    _LINEAR.update(kinds)


def nodes(*kinds: type[nn.Module]) -> Callable[[Callable[..., list[Node]]], Callable[..., list[Node]]]:
    """For modules that are a chain of steps, each with a clean point of its own: `function(module) -> its nodes`."""

    def enter(function: Callable[..., list[Node]]) -> Callable[..., list[Node]]:
        _NODES.update(dict.fromkeys(kinds, function))
        return function

    return enter


def trunk_nodes(
    kind: type[nn.Module],
) -> Callable[[Callable[..., tuple[list[Node], nn.Linear]]], Callable[..., tuple[list[Node], nn.Linear]]]:
    """For whole models: `function(model) -> (nodes, head)` with model(x) = head(nodes(x))."""

    def enter(function: Callable[..., tuple[list[Node], nn.Linear]]) -> Callable[..., tuple[list[Node], nn.Linear]]:
        _TRUNKS[kind] = function
        return function

    return enter


def trunk_of(model: nn.Module) -> tuple[list[Node], nn.Linear]:
    """The nodes of a model up to its linear head, with local first-order rules. Raises `NoRule`."""
    with local():
        classifier_of(model)  # refuses what the first-order rules refuse
        if type(model) not in _TRUNKS:
            raise NoRule(model, "no chain of remainders is written for this kind of model")
        return _TRUNKS[type(model)](model)


def nodes_of(module: nn.Module) -> list[Node]:
    """The nodes of a part: its own list, or itself as the only one."""
    if type(module) in _NODES:
        return _NODES[type(module)](module)
    return [(layer_of(module), expansion_of(module))]


def residual_node(*branch: nn.Module) -> Node:
    """x + branch(x), branch being the composition of these modules: one node, because J = I + J_branch is one norm.

    Its rule of first order is not asked for: ||J|| r + beta(r) is as good where it matters, and a rule that measures
    I + branch again, as zeta does, costs more than all the rest."""
    parts = [(layer_of(module), expansion_of(module)) for module in branch]

    def layer(x: Tensor) -> tuple[Tensor, Bound]:
        y = x
        for module in branch:
            y = module(y)
        return x + y, lambda r: torch.where(r > 0, torch.inf, 0.0)

    named = tuple(part for first, _ in parts for part in parts_of(first))
    return Step(layer, named), residual_expansion(composition(parts))


def curvature_types() -> list[type[nn.Module]]:
    """Every module type with a rule that is not linear; tests enumerate it."""
    return sorted(_CURVATURES, key=lambda kind: f"{kind.__module__}.{kind.__qualname__}")


def expansion_of(module: nn.Module) -> Expand:
    """The rule of `module`, its weights already measured. Raises `NoRule`."""
    layer = layer_of(module)  # refuses what has no rule of first order: hooks, unknown types, unsound activations
    if type(module) in _LINEAR:
        return linear_expansion(module, layer)
    if type(module) not in _CURVATURES:
        raise NoRule(module, "no remainder is proved for this module type")
    return _CURVATURES[type(module)](module)


@nodes(nn.Sequential)
def sequential(module: nn.Sequential) -> list[Node]:
    """Those of the children."""
    return [node for child in module for node in nodes_of(child)]


linear(nn.Linear, nn.Identity, nn.Dropout, nn.Flatten)


def linear_expansion(
    f: Callable[[Tensor], Tensor], layer: Layer, gram: Callable[[Tensor], Tensor] | None = None
) -> Expand:
    """An affine map whose norm is what its first-order rule says of r = 1; `gram` as in `Expansion`."""

    def expand(x: Tensor) -> Expansion:
        y, bound = layer(x)
        gain_B = bound(torch.ones(len(x), dtype=x.dtype, device=x.device))
        pull = pullback(f, x)
        return Expansion(y, gain_B, torch.zeros_like, lambda g: torch.zeros_like, pull, own_gram=gram, linear=True)

    return expand


def pullback(f: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[Tensor], Tensor]:
    """g (C, B, *y) -> J^T g (C, B, *x) by automatic differentiation at x."""

    def pull(g: Tensor) -> Tensor:
        vjp = torch.func.vjp(f, x)[1]
        return torch.vmap(lambda g_one: vjp(g_one)[0])(g)

    return pull


def composition(parts: Sequence[tuple[Layer, Expand]]) -> Expand:
    """f_L o ... o f_1, each part with its first-order rule for the radii e_k:

    <g, R(G)> = sum_k <g_k, R_k(G_{k-1})>,            g_{k-1} = J_k^T g_k
    ||R(G)||  <= sum_k ||J_L|| ... ||J_{k+1}|| beta_k(e_{k-1})

    Linear parts at the end have no remainder, and nobody asks how far their inputs move.
    """

    def expand(x: Tensor) -> Expansion:
        inputs, expansions = [], list[Expansion]()
        for _, expand_part in parts:
            inputs.append(x)
            expansions.append(expand_part(x))
            x = expansions[-1].y
        bent = 1 + max((k for k, expansion in enumerate(expansions) if not expansion.linear), default=0)
        bounds = [layer(before)[1] for (layer, _), before in zip(parts[: bent - 1], inputs, strict=False)]

        def radii(r: Tensor) -> list[Tensor]:
            """e_0, e_1, ...: what each part gets, up to the last one that is not linear."""
            found = [r]
            for bound in bounds:
                found.append(bound(found[-1]))
            return found

        def beta(r: Tensor) -> Tensor:
            total = torch.zeros_like(r)
            for expansion, e in zip(expansions[:bent], radii(r), strict=True):
                total = expansion.gain_B * total + expansion.beta(e)
            for expansion in expansions[bent:]:
                total = expansion.gain_B * total
            return total

        def pull(g: Tensor) -> Tensor:
            for expansion in reversed(expansions):
                g = expansion.pull(g)
            return g

        def push(v: Tensor) -> Tensor:
            for expansion in expansions:
                v = expansion.push(v)
            return v

        def remainder(g: Tensor) -> Bound:
            terms: list[Bound] = []
            for expansion in reversed(expansions[bent:]):
                g = expansion.pull(g)
            for k in range(bent - 1, -1, -1):
                terms.insert(0, expansions[k].remainder(g))
                if k:
                    g = expansions[k].pull(g)
            return lambda r: reduce(torch.add, (term(e) for term, e in zip(terms, radii(r), strict=True)))

        gain_B = torch.stack([expansion.gain_B for expansion in expansions]).prod(0)
        return Expansion(x, gain_B, beta, remainder, pull, push)

    return expand


def residual_expansion(branch: Expand) -> Expand:
    """x + branch(x): the identity has no remainder."""

    def expand(x: Tensor) -> Expansion:
        inner = branch(x)
        return Expansion(
            x + inner.y,
            1 + inner.gain_B,
            inner.beta,
            inner.remainder,
            lambda g: g + inner.pull(g),
            lambda v: v + inner.push(v),
        )

    return expand
