"""What is known of a module type: one record, `Facts`, entered by one call. Start reading here.

    register(MyModule, Facts(rule=my_rule, expansion=my_expansion))

Each fact is a function of the module, and is asked for by a function of its own, which refuses where there is none:

    rule, residual         first order: how far module(x), or x + module(x), moves         rules.py       layer_of
    local, local_residual  the same, sharper: for those who ask with local=True            rules.py       layer_of
    chain                  the modules and links it is composed of; all else follows       links.py       layer_of, ...
    trunk                  of a whole model: the same up to its linear head, and the head  rules.py       classifier_of
    expansion              second order: the gain of its linearisation, and the remainder  curvature.py   expansion_of
    activation             of a scalar activation: its slopes, and their change            activations.py activation_of
    rounding               how far the served module is from the float64 one               rounding.py    roundings_of
    split                  of softmax attention: how queries, keys and values are made     zoo/attention/qkv.py
    mixing                 the same: its rules with another mixing of the values           zoo/attention/facts.py
    shapes                 of its parameters and buffers, which all of this is proved for  hypotheses.py

A module has `rule` or `chain`, and `shapes` if it has parameters or buffers of its own; everything else may be missing,
and is then refused or does without. Look-up is by the exact type: a subclass with another `forward` would inherit a
false proof.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor, nn

from certizoo import UserError
from zoo import pristine
from zoo.bounds import genuine
from zoo.bounds.contracts import Activation, Expand, Layer, Node, Precision, Rounding
from zoo.bounds.hypotheses import Shapes, fault_of_numbers, fault_of_shapes, unstated

M = TypeVar("M", bound=nn.Module)
M_contra = TypeVar("M_contra", bound=nn.Module, contravariant=True)


class Link(Protocol):
    """A link of a chain that is no module by itself: a residual sum, an affine map (links.py)."""

    def __call__(self, x: Tensor, /) -> Tensor: ...

    def layer(self, local: bool) -> Layer:
        """First order."""
        ...

    def nodes(self) -> list[Node]:
        """Second order, with local rules of first order."""
        ...

    def roundings(self, precision: Precision) -> list[Rounding]:
        """One for every node."""
        ...


Links = Sequence[nn.Module | Link]
"""What a module is composed of, in order."""


@dataclass(frozen=True, kw_only=True)
class Facts(Generic[M_contra]):
    """All that is known of one module type, as the head of this file says. None: nothing."""

    rule: Callable[[M_contra], Layer] | None = None
    residual: Callable[[M_contra], Layer] | None = None
    local: Callable[[M_contra], Layer] | None = None
    local_residual: Callable[[M_contra], Layer] | None = None
    chain: Callable[[M_contra], Links] | None = None
    trunk: Callable[[M_contra], tuple[Links, nn.Linear]] | None = None
    expansion: Callable[[M_contra], Expand] | None = None
    activation: Callable[[M_contra], Activation] | None = None
    rounding: Callable[[M_contra, Precision], Rounding] | None = None
    split: Callable[[M_contra], Any] | None = None
    mixing: Callable[..., Any] | None = None
    shapes: Callable[[M_contra], Shapes] | None = None


NOTHING: Facts[nn.Module] = Facts()
_TABLE: dict[type[nn.Module], Facts[Any]] = {}


def register(kind: type[M], facts: Facts[M]) -> None:
    """Enter what is known of modules of exactly this type. Once a type: all of it stands in one place.

    Its code is kept as it is now: what is known is known of that. `Facts()` says that the type is a part which the
    rules around it read; every module of a certified model is torch's own or registered.
    """
    if _TABLE.get(kind, NOTHING) != NOTHING:
        raise ValueError(f"{kind.__module__}.{kind.__qualname__} is registered already; say all of it in one place")
    _TABLE[kind] = facts
    pristine.remember(kind)


def facts_of(module: nn.Module) -> Facts[Any]:
    """What is known of `module`; NOTHING of an unknown type. Raises `NoRule` for a module that was altered."""
    refuse_altered(module)
    return _TABLE.get(type(module), NOTHING)


def types_where(wanted: Callable[[Facts[Any]], Any]) -> list[type[nn.Module]]:
    """Every type whose facts are wanted, such as `lambda facts: facts.local`; tests enumerate them."""
    found = [kind for kind, facts in _TABLE.items() if wanted(facts)]
    return sorted(found, key=lambda kind: f"{kind.__module__}.{kind.__qualname__}")


class NoRule(UserError):
    """The model holds a module for which nothing is proved."""

    def __init__(self, module: nn.Module, reason: str = "", path: str = "") -> None:
        kind = type(module)
        where = f"{path}: " if path else ""
        super().__init__(
            f"NoRule({where}{kind.__module__}.{kind.__qualname__}): "
            f"{reason or 'no rule is proved for this module type'}; "
            "certificates need a rule for every module (CONTRIBUTING.md, 'how to add an attention')"
        )
        self.module_type = kind


def expect(part: nn.Module, *kinds: type[nn.Module]) -> None:
    """For rules that read the weights of a part: it must be exactly of a type they were proved for, and unaltered."""
    refuse_altered(part)
    if type(part) not in kinds:
        raise NoRule(part, f"a {' or '.join(kind.__name__ for kind in kinds)} was expected in its place")


def refuse_altered(module: nn.Module, path: str = "") -> None:
    """A hook, a patched method, a number in disguise (genuine.py), or a weight of another shape (hypotheses.py) make it
    another function than the one that the facts speak of. Raises `NoRule`."""
    if fault := genuine.fault_of(module) or fault_of_shapes(module, _shapes(module)):
        raise NoRule(module, fault, path)


def refuse_unknown(module: nn.Module, path: str = "") -> None:
    """Also of parts that no rule asks about: what they do must be code that is known, and their numbers of known shapes
    and within the range of the proofs. Raises `NoRule`."""
    if not genuine.is_known(type(module)):
        raise NoRule(module, path=path)
    if fault := unstated(module, shapes := _shapes(module)) or fault_of_numbers(module, shapes):
        raise NoRule(module, fault, path)


def _shapes(module: nn.Module) -> Shapes:
    """Those stated; also of a module with parametrised weights, whose type is torch's."""
    stated = _TABLE.get(genuine.kind_of(module), NOTHING).shapes
    return {} if stated is None else stated(module)
