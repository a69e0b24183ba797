"""First order: how far the output of a module can move when its input moves by at most r.

A rule works in three stages, so that each thing is computed once:

    rule(module)      -> layer       norms of the weights, once per checkpoint
    layer(x_clean)    -> (y, bound)  the clean output and everything that depends on the image, once per image batch
    bound(r)          -> r'          as often as the bisection asks

with the promise, for every x' with ||x' - x||_F <= r (all tokens and channels of one image together),

    ||module(x') - module(x)||_F <= bound(r),      bound nondecreasing in r.

Shapes: x (B, ...), float64; r (..., B); a radius may be infinite, never negative. Proofs: docs/proofs.md.

Some types have two rules: the published one, and a tighter one of our own, used with `local=True`. A chain passes
`local` on to all its parts. Rules are kept in rule_table.py.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor, nn

from certizoo import UserError
from zoo.bounds.contracts import Bound, Layer
from zoo.bounds.hypotheses import in_range
from zoo.bounds.integrity import modules_of
from zoo.bounds.rule_table import Link, Links, NoRule, expect, refuse_altered, refuse_unknown, rules_of, together


@dataclass(frozen=True)
class Step:
    """A layer with a name: the modules it describes, or a word where it is not a module."""

    layer: Layer
    parts: tuple[nn.Module | str, ...]

    def __call__(self, x: Tensor) -> tuple[Tensor, Bound]:
        y, bound = self.layer(x)
        return y, in_range(bound)


@dataclass(frozen=True)
class Unmeasured(Step):
    """A layer whose rule is measured by `measured` only, because another bound of its radius is mostly as good."""

    measured: Callable[[], Layer]


@dataclass(frozen=True)
class Chain:
    """The composition f_L o ... o f_1: each layer passes its radius on to the next."""

    steps: tuple[Layer, ...]
    parts: tuple[nn.Module | str, ...]

    def __call__(self, x: Tensor) -> tuple[Tensor, Bound]:
        bounds = []
        for step in self.steps:
            x, bound = step(x)
            bounds.append(bound)
        return x, lambda r: radii(bounds, r)[-1]


def layer_of(module: nn.Module | Link, *, local: bool = False) -> Layer:
    """Return the rule of a module, its weights already measured, or of a link of a chain. Raises `NoRule`."""
    if not isinstance(module, nn.Module):
        return module.layer(local)
    rules = rules_of(module)
    if local and rules.local is not None:
        return _named(module, rules.local(module))
    if rules.rule is not None:
        return _named(module, rules.rule(module))
    if rules.chain is not None:
        return _named(module, chain(together(partial(layer_of, local=local), rules.chain(module))))
    raise NoRule(module)


def _named(module: nn.Module, layer: Layer) -> Layer:
    return replace(layer, parts=(module,)) if isinstance(layer, Chain) else Step(layer, (module,))


def residual_layer_of(module: nn.Module | Link, *, local: bool = False) -> Layer:
    """Return the rule of x -> x + module(x)."""
    if isinstance(module, nn.Module):
        rules = rules_of(module)
        rule = rules.local_residual if local and rules.local_residual is not None else rules.residual
        if rule is not None:
            return Step(rule(module), (module,))
    return residual(layer_of(module, local=local))


def classifier_of(model: nn.Module, *, local: bool = False) -> tuple[Layer, nn.Linear]:
    """Return the rule of a whole model up to its linear head, and the head. Raises `NoRule`.

    As model(x) = head(trunk(x)), a certificate can compare classes in pairs, ||w_y - w_j||, instead of bounding the
    vector of logits.
    """
    links, head = trunk(model)
    return chain(layer_of(link, local=local) for link in links), head


def trunk(model: nn.Module) -> tuple[Sequence[nn.Module | Link], nn.Linear]:
    """Return the links of a model and its head; modules that are only chains are split into their links.

    Raises `NoRule` for a model that was altered anywhere, with modules of unknown type, or with numbers that the proofs
    do not cover. This includes parts inside modules whose rule reads the weights without calling the parts.
    """
    together(lambda found: refuse_altered(found[1], found[0]), modules_of(model))
    together(lambda found: refuse_unknown(found[1], found[0]), modules_of(model))
    rules = rules_of(model)
    if rules.trunk is None:
        raise NoRule(model)
    links, head = rules.trunk(model)
    expect(head, nn.Linear)
    return list(_apart(links)), head


def _apart(links: Iterable[nn.Module | Link]) -> Iterator[nn.Module | Link]:
    for link in links:
        parts = _parts(link) if isinstance(link, nn.Module) else None
        if parts is None:
            yield link
        else:
            yield from _apart(parts)


def _parts(module: nn.Module) -> Links | None:
    """Return the links of a module that is only a chain, with no other rules."""
    rules = rules_of(module)
    alone = rules.rule is rules.local is rules.expansion is None
    return rules.chain(module) if rules.chain is not None and alone else None


def residual(branch: Layer) -> Layer:
    """Return the rule of x + branch(x) where nothing better is known: the radii add up."""

    def layer(x: Tensor) -> tuple[Tensor, Bound]:
        y, bound = branch(x)
        return added(x, y), lambda r: r + bound(r)

    return Step(layer, parts_of(branch))


def added(x: Tensor, y: Tensor) -> Tensor:
    """Return x + y, both of one shape.

    Under broadcasting, one term would enter the sum many times, and no rule counts that.
    """
    if x.shape != y.shape:
        raise UserError(
            f"a residual branch maps {tuple(x.shape)} to {tuple(y.shape)}; give input and output the same shape"
        )
    return x + y


def chain(layers: Iterable[Layer]) -> Chain:
    """Return the composition of layers. Chains inside are flattened, so that a whole model's steps can be listed."""
    given = list(layers)
    steps = tuple(step for layer in given for step in steps_of(layer))
    return Chain(steps, tuple(part for layer in given for part in parts_of(layer)))


def steps_of(layer: Layer) -> tuple[Layer, ...]:
    """Return the steps of a chain; any other layer is one step."""
    return layer.steps if isinstance(layer, Chain) else (layer,)


def parts_of(layer: Layer) -> tuple[nn.Module | str, ...]:
    """Return the names of a layer; a bare function has none."""
    return layer.parts if isinstance(layer, Step | Chain) else ()


def radii(bounds: Sequence[Bound], r: Tensor) -> list[Tensor]:
    """Return e_0 = r, e_1 = bound_1(e_0), ..., e_L."""
    found = [r]
    for bound in bounds:
        found.append(bound(found[-1]))
    return found


def scaled(module: nn.Module, lipschitz: Tensor | float) -> Layer:
    """Return the rule of a module with a known global Lipschitz constant."""
    return lambda x: (module(x), lambda r: lipschitz * r)
