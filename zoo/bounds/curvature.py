"""Second order: how far a module is from its linearisation at the clean input. The adjoint certificate builds on this.

    f(x + G) = f(x) + J G + R(G),     J = Df(x)

A rule has the same stages as those of `first_order.py`:

    expansion(module) -> expand(x_clean) -> Expansion      and its bounds in r as often as the bisection asks

with the promise, for every G with ||G||_F <= r (all tokens and channels of one image together),

    ||J|| <= gain,      ||R(G)||_F <= beta(r),      -<g, R(G)> <= remainder(g)(r),

beta and remainder nondecreasing in r, zero at 0, infinite where nothing is known. An affine module has R = 0, and its
rule is `affine`. Rules are kept in rule_table.py. Proofs: docs/proofs.md#adjoint-certificate,
docs/proofs.md#composition.

Shapes: x (B, ...), float64; g (C, B, ...) for C classes; r (..., B) for beta, (..., C or 1, B) for remainder.
"""

import math
from collections.abc import Callable, Sequence
from functools import reduce

import torch
from torch import Tensor, nn

from zoo.arithmetic import U, broadcast_batch
from zoo.bounds.contracts import Bound, Expand, Expansion, Layer, Node
from zoo.bounds.first_order import Unmeasured, added, layer_of, radii, trunk
from zoo.bounds.hypotheses import expanded_in_range
from zoo.bounds.products import ABOVE, affine_rounding, chained
from zoo.bounds.rule_table import Link, NoRule, rules_of, together


def trunk_of(model: nn.Module) -> tuple[list[Node], nn.Linear]:
    """Return the nodes of a model up to its linear head, with local first-order rules. Raises `NoRule`."""
    links, head = trunk(model)
    return [node for nodes in together(nodes_of, links) for node in nodes], head


def nodes_of(module: nn.Module | Link) -> list[Node]:
    """Return the nodes of a part: those of its chain, or itself as the only one."""
    if not isinstance(module, nn.Module):
        return module.nodes()
    rules = rules_of(module)
    if rules.chain is not None and rules.expansion is None:
        return [node for nodes in together(nodes_of, rules.chain(module)) for node in nodes]
    if rules.expansion is affine:  # both orders read one norm, which is measured once
        layer = layer_of(module, local=True)
        return [(layer, affine_expansion(module, layer))]
    return [(layer_of(module, local=True), expansion_of(module))]


def expansion_of(module: nn.Module) -> Expand:
    """Return the second order of `module`, its weights already measured. Raises `NoRule`."""
    expansion = rules_of(module).expansion
    if expansion is not affine:  # `affine` calls layer_of itself
        layer_of(module, local=True)  # refuses a module without a first-order rule, such as an unsound activation
    if expansion is None:
        raise NoRule(module, "no remainder is proved for this module type")
    return expanded_in_range(expansion(module))


def affine(module: nn.Module) -> Expand:
    """Expand a module that is affine in its input: R = 0, and its first-order rule bounds J."""
    return affine_expansion(module, layer_of(module, local=True))


def affine_expansion(
    f: Callable[[Tensor], Tensor], layer: Layer, gram: Callable[[Tensor], Tensor] | None = None
) -> Expand:
    """Expand an affine map whose norm is its first-order bound at r = 1; `gram` as in `Expansion`."""
    roundings = dict[torch.Size, float]()  # one for each image size

    def expand(x: Tensor) -> Expansion:
        y, bound = layer(x)
        ones_B = torch.ones(len(x), dtype=x.dtype, device=x.device)
        pull, push = affine_pullback(f, x), linear_part(f, x)
        if x.shape[1:] not in roundings:
            roundings[x.shape[1:]] = affine_rounding(f, pullback(f, x[:1]), x[:1])
        return Expansion.without_remainder(
            y=y,
            gain_B=bound(ones_B),
            pull=pull,
            own_push=push,
            own_gram=gram,
            rounding_B=roundings[x.shape[1:]] * ones_B,
        )

    return expand


def pullback(f: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[Tensor], Tensor]:
    """Return the map g (C, B, *y) -> J^T g (C, B, *x), by automatic differentiation at x."""
    return lambda g: _each(torch.func.vjp(f, x)[1], g)


def affine_pullback(f: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[Tensor], Tensor]:
    """Return `pullback` of an affine f, from a single record of f: it holds nothing but weights.

    The rounding of what f does to its weights is not in this record.
    """
    vjp = torch.func.vjp(f, x)[1]
    return lambda g: _each(vjp, g)


def _each(vjp: Callable[[Tensor], tuple[Tensor]], g: Tensor) -> Tensor:
    return torch.vmap(lambda g_one: vjp(g_one)[0])(g)


def linear_part(f: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[Tensor], Tensor]:
    """Return the map v (C, B, *x) -> J v (C, B, *y) of an affine f, computed as (f(s v) - f(0)) / s.

    s, a power of two for each vector, makes s v far larger than the offset f(0). Rounding is then relative to |v|
    for any offset.
    """
    offset = f(torch.zeros_like(x[:1]))
    largest = float(offset.abs().max())

    def moved(v: Tensor) -> Tensor:
        return (f(v.flatten(0, 1)) - offset).unflatten(0, v.shape[:2])

    def push(v: Tensor) -> Tensor:
        length_CB = v.flatten(2).abs().amax(-1).nan_to_num(1.0, 1.0)  # NaN and infinity stay unknown anyway
        size_CB = math.log2(largest) + ABOVE - length_CB.clamp_min(1e-300).log2()
        s_CB = size_CB.ceil().clamp(-500, 500).exp2()
        pushed = moved(broadcast_batch(s_CB, v.shape[2:]) * v)
        return pushed / broadcast_batch(s_CB, pushed.shape[2:])

    return push if largest else moved


def composition(parts: Sequence[Node]) -> Expand:
    """Expand f_L o ... o f_1, each part with its first-order rule for the radii e_k.

        <g, R(G)> = sum_k <g_k, R_k(G_{k-1})>,            g_{k-1} = J_k^T g_k
        ||R(G)||  <= sum_k ||J_L|| ... ||J_{k+1}|| beta_k(e_{k-1})

    Affine parts at the end have no remainder, so the radii of their inputs are not needed.

    Proof: docs/proofs.md#composition.
    """
    before_last = [(one.measured() if isinstance(one, Unmeasured) else one, expand) for one, expand in parts[:-1]]
    parts = [*before_last, *parts[-1:]]

    def expand(x: Tensor) -> Expansion:
        layers, inputs, expansions = list[Layer](), list[Tensor](), list[Expansion]()
        for layer, expand_part in parts:
            expansion = expand_part(x)
            if expansion.y is not x or not expansions:  # a part that returns its own input is left out
                layers.append(layer)
                inputs.append(x)
                expansions.append(expansion)
            x = expansion.y
        curved = 1 + max((k for k, expansion in enumerate(expansions) if not expansion.affine), default=0)
        bounds = [layer(before)[1] for layer, before in zip(layers[: curved - 1], inputs, strict=False)]

        def beta(r: Tensor) -> Tensor:
            total = torch.zeros_like(r)
            for expansion, e in zip(expansions[:curved], radii(bounds, r), strict=True):
                total = expansion.gain_B * total + expansion.beta(e)
            for expansion in expansions[curved:]:
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
            for expansion in reversed(expansions[curved:]):
                g = expansion.pull(g)
            for k in range(curved - 1, -1, -1):
                terms.insert(0, expansions[k].remainder(g))
                if k:
                    g = expansions[k].pull(g)
            return lambda r: reduce(torch.add, (term(e) for term, e in zip(terms, radii(bounds, r), strict=True)))

        gain_B = torch.stack([expansion.gain_B for expansion in expansions]).prod(0)
        rounding_B = chained(expansions)
        return Expansion(
            y=x,
            gain_B=gain_B,
            beta=beta,
            remainder=remainder,
            pull=pull,
            own_push=push,
            rounding_B=rounding_B,
            parts=tuple(expansions),
        )

    return expand


def identity_expansion(x: Tensor) -> Expansion:
    """Expand the identity."""
    ones_B = torch.ones(len(x), dtype=x.dtype, device=x.device)

    def same(v: Tensor) -> Tensor:
        return v

    return Expansion.without_remainder(
        y=x,
        gain_B=ones_B,
        pull=same,
        own_push=same,
        rounding_B=0 * ones_B,
    )


def ended(parts: tuple[Expansion, ...]) -> tuple[Expansion, ...]:
    """Return the parts of a branch, with an identity after a sum at its end.

    The rounding of a sum is measured by the size of the input of the next leaf (certify/ellipsoids/rounding.py).
    """
    return (*parts, identity_expansion(parts[-1].y)) if parts and parts[-1].branches else parts


def residual_expansion(branch: Expand) -> Expand:
    """Expand x + branch(x): the identity has no remainder."""

    def expand(x: Tensor) -> Expansion:
        inner = branch(x)
        return Expansion(
            y=added(x, inner.y),
            gain_B=1 + inner.gain_B,
            beta=inner.beta,
            remainder=inner.remainder,
            pull=lambda g: g + inner.pull(g),
            own_push=lambda v: v + inner.push(v),
            rounding_B=inner.rounding + 2 * U * (1 + inner.gain_B),
            branches=((), ended(inner.parts or (inner,))),
        )

    return expand
