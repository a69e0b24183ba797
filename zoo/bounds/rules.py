"""The rule table: how far the output of a module can move when its input moves by at most r.

A rule works in three stages, so that each thing is computed once:

    rule(module)      -> layer     norms of the weights, once per checkpoint
    layer(x_clean)    -> (y, bound)  the clean output and what depends on the image, once per image batch
    bound(r)          -> r'        as often as the bisection asks

with the promise, for every x' with ||x' - x||_F <= r (all tokens and channels of one image together),

    ||module(x') - module(x)||_F <= bound(r),      bound nondecreasing in r.

Shapes: x (B, ...), float64; r (..., B); a radius may be infinite, never negative. The table is keyed by the exact
type: a subclass with another `forward` would inherit a false proof. Source: MATH.md section 2.

Some types have two rules: the published one, and a sharper one of our own that is taken while `local()` is active.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

from torch import Tensor, nn

from certizoo import UserError
from zoo.spectral import sigma_upper

Bound = Callable[[Tensor], Tensor]
Layer = Callable[[Tensor], tuple[Tensor, Bound]]
Rule = Callable[[nn.Module], Layer]

_RULES: dict[type[nn.Module], Rule] = {}
_RESIDUAL_RULES: dict[type[nn.Module], Rule] = {}
_LOCAL_RULES: dict[type[nn.Module], Rule] = {}
_LOCAL_RESIDUAL_RULES: dict[type[nn.Module], Rule] = {}
_LOCAL: ContextVar[bool] = ContextVar("local", default=False)
_CLASSIFIER_RULES: dict[type[nn.Module], Callable[..., tuple[Layer, nn.Linear]]] = {}


@dataclass(frozen=True)
class Step:
    """A layer that can be named: by the modules it speaks of, or by a word where it is no module."""

    layer: Layer
    parts: tuple[nn.Module | str, ...]

    def __call__(self, x: Tensor) -> tuple[Tensor, Bound]:
        return self.layer(x)


@dataclass(frozen=True)
class Chain:
    """The composition f_L o ... o f_1: radii are passed on from layer to layer."""

    steps: tuple[Layer, ...]
    parts: tuple[nn.Module | str, ...]

    def __call__(self, x: Tensor) -> tuple[Tensor, Bound]:
        bounds = []
        for step in self.steps:
            x, bound = step(x)
            bounds.append(bound)
        return x, lambda r: radii(bounds, r)[-1]


class NoRule(UserError):
    """The model holds a module for which nothing is proved."""

    def __init__(self, module: nn.Module, reason: str = "") -> None:
        kind = type(module)
        super().__init__(
            f"NoRule({kind.__module__}.{kind.__qualname__}): {reason or 'no rule is proved for this module type'}; "
            "certificates need a rule for every module (CONTRIBUTING.md, 'how to add an attention')"
        )
        self.module_type = kind


def _entering(
    table: dict[type[nn.Module], Rule], kinds: tuple[type[nn.Module], ...]
) -> Callable[..., Callable[..., Layer]]:
    def enter(function: Callable[..., Layer]) -> Callable[..., Layer]:
        table.update(dict.fromkeys(kinds, function))
        return function

    return enter


def rule(*kinds: type[nn.Module]) -> Callable[[Callable[..., Layer]], Callable[..., Layer]]:
    """Enter the decorated function into the table for these exact types."""
    return _entering(_RULES, kinds)


def residual_rule(*kinds: type[nn.Module]) -> Callable[[Callable[..., Layer]], Callable[..., Layer]]:
    """The same for the map x -> x + module(x), where that is tighter than r + bound(r)."""
    return _entering(_RESIDUAL_RULES, kinds)


def local_rule(*kinds: type[nn.Module]) -> Callable[[Callable[..., Layer]], Callable[..., Layer]]:
    """A rule that goes before that of `rule` while `local()` is active: sharper, dearer, or not the published one."""
    return _entering(_LOCAL_RULES, kinds)


def local_residual_rule(*kinds: type[nn.Module]) -> Callable[[Callable[..., Layer]], Callable[..., Layer]]:
    """The same for x -> x + module(x)."""
    return _entering(_LOCAL_RESIDUAL_RULES, kinds)


@contextmanager
def local() -> Iterator[None]:
    """Layers that are built inside take local rules where there are any. Rules are looked up only while building, so
    that a layer keeps the rules it was built with."""
    token = _LOCAL.set(True)
    try:
        yield
    finally:
        _LOCAL.reset(token)


def classifier_rule(
    kind: type[nn.Module],
) -> Callable[[Callable[..., tuple[Layer, nn.Linear]]], Callable[..., tuple[Layer, nn.Linear]]]:
    """For whole models: (trunk, head) with model(x) = head(trunk(x)), so that a certificate can compare classes in
    pairs, ||w_y - w_j||, instead of bounding the vector of logits."""

    def enter(function: Callable[..., tuple[Layer, nn.Linear]]) -> Callable[..., tuple[Layer, nn.Linear]]:
        _CLASSIFIER_RULES[kind] = function
        return function

    return enter


def classifier_of(model: nn.Module) -> tuple[Layer, nn.Linear]:
    """The trunk's rule and the linear head of a model. Raises `NoRule`."""
    for module in model.modules():  # also inside modules whose rule reads the weights without calling the parts
        _refuse_altered(module)
    if type(model) not in _CLASSIFIER_RULES:
        raise NoRule(model)
    trunk, head = _CLASSIFIER_RULES[type(model)](model)
    expect(head, nn.Linear)
    return trunk, head


def rule_types() -> list[type[nn.Module]]:
    """Every module type with a rule; tests enumerate it."""
    return sorted(_RULES, key=lambda kind: f"{kind.__module__}.{kind.__qualname__}")


def local_rule_types() -> list[type[nn.Module]]:
    """Every module type with a local rule; tests enumerate it."""
    return sorted(_LOCAL_RULES, key=lambda kind: f"{kind.__module__}.{kind.__qualname__}")


def layer_of(module: nn.Module) -> Layer:
    """The rule of `module`, its weights already measured. Raises `NoRule`."""
    _refuse_altered(module)
    if _LOCAL.get() and type(module) in _LOCAL_RULES:
        return _named(module, _LOCAL_RULES[type(module)](module))
    if type(module) not in _RULES:
        raise NoRule(module)
    return _named(module, _RULES[type(module)](module))


def _named(module: nn.Module, layer: Layer) -> Layer:
    return replace(layer, parts=(module,)) if isinstance(layer, Chain) else Step(layer, (module,))


def residual_layer_of(module: nn.Module) -> Layer:
    """The rule of x -> x + module(x)."""
    _refuse_altered(module)
    if _LOCAL.get() and type(module) in _LOCAL_RESIDUAL_RULES:
        return Step(_LOCAL_RESIDUAL_RULES[type(module)](module), (module,))
    if type(module) in _RESIDUAL_RULES:
        return Step(_RESIDUAL_RULES[type(module)](module), (module,))
    return residual(layer_of(module))


def residual(branch: Layer) -> Layer:
    """x + branch(x) where nothing better is known: the radii add up."""

    def layer(x: Tensor) -> tuple[Tensor, Bound]:
        y, bound = branch(x)
        return x + y, lambda r: r + bound(r)

    return Step(layer, parts_of(branch))


def chain(layers: Iterable[Layer]) -> Chain:
    """The composition of layers; chains in it become a part of it, so that the steps of a whole model can be read."""
    given = list(layers)
    steps = tuple(step for layer in given for step in steps_of(layer))
    return Chain(steps, tuple(part for layer in given for part in parts_of(layer)))


def steps_of(layer: Layer) -> tuple[Layer, ...]:
    """The steps of a chain; any other layer is one step."""
    return layer.steps if isinstance(layer, Chain) else (layer,)


def parts_of(layer: Layer) -> tuple[nn.Module | str, ...]:
    """What a layer is named by; nothing for a bare function."""
    return layer.parts if isinstance(layer, Step | Chain) else ()


def radii(bounds: Sequence[Bound], r: Tensor) -> list[Tensor]:
    """e_0 = r, e_1 = bound_1(e_0), ..., e_L."""
    found = [r]
    for bound in bounds:
        found.append(bound(found[-1]))
    return found


def scaled(module: nn.Module, lipschitz: Tensor | float) -> Layer:
    """A module with a known global Lipschitz constant."""
    return lambda x: (module(x), lambda r: lipschitz * r)


def expect(part: nn.Module, kind: type[nn.Module]) -> None:
    """For rules that read the weights of a part: it must be exactly of the type they were proved for."""
    if type(part) is not kind:
        raise NoRule(part, f"a {kind.__name__} was expected in its place")


def _refuse_altered(module: nn.Module) -> None:
    """A hook or a patched `forward` makes it another function than the one the rule was proved for."""
    hooks = module._forward_hooks or module._forward_pre_hooks
    if hooks or "forward" in vars(module):
        raise NoRule(module, "it carries a forward hook or a patched forward; remove it before certifying")


@rule(nn.Sequential)
def sequential(module: nn.Sequential) -> Layer:
    """Composition of the children."""
    return chain(layer_of(child) for child in module)


# torch modules -------------------------------------------------------------------------------------------------------


@rule(nn.Linear)
def linear(module: nn.Linear) -> Layer:
    """||W x' - W x|| <= ||W|| ||x' - x||, token by token, hence for all tokens together."""
    return scaled(module, sigma_upper(module.weight))


@rule(nn.Identity, nn.Dropout, nn.Flatten)
def identity(module: nn.Module) -> Layer:
    """Identities in eval mode (dropout is off), or a mere reshaping."""
    return scaled(module, 1.0)


@rule(nn.ReLU, nn.Tanh)
def unit_slope(module: nn.Module) -> Layer:
    """0 <= sigma' <= 1."""
    return scaled(module, 1.0)


# Largest slopes, rounded up by one unit of the last printed decimal. erf-GELU: Phi(sqrt2) + sqrt2 phi(sqrt2) at
# sqrt2; the often quoted 1.12 is below it (trap D3).
GELU_SLOPE = {"none": 1.1289041452, "tanh": 1.1289930688}


SILU_SLOPE = 1.0998393202  # at 2.39936
SIGMOID_SLOPE = 0.25
NO_JUMP = 40.0  # softplus is log(1 + e^{b z}) / b up to b z = threshold, then z: a jump of e^-threshold / b


@rule(nn.SiLU)
def silu(module: nn.SiLU) -> Layer:
    """z / (1 + e^-z)."""
    return scaled(module, SILU_SLOPE)


@rule(nn.Sigmoid)
def sigmoid(module: nn.Sigmoid) -> Layer:
    """sigma' = sigma (1 - sigma)."""
    return scaled(module, SIGMOID_SLOPE)


@rule(nn.Softplus)
def softplus(module: nn.Softplus) -> Layer:
    """0 < sigma' < 1, where the jump at the threshold is less than rounding."""
    if module.beta <= 0:
        raise NoRule(module, "softplus needs beta > 0")
    if module.threshold < NO_JUMP:
        raise NoRule(module, f"softplus jumps at its threshold {module.threshold:g}; create it with threshold=40")
    return unit_slope(module)


@rule(nn.GELU)
def gelu(module: nn.GELU) -> Layer:
    """The constant depends on the variant (MATH.md section 2)."""
    return scaled(module, GELU_SLOPE[module.approximate])
