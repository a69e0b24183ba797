"""The rules of every module type: one record, `ModuleRules`, entered by one call. Start reading here.

    register(MyModule, ModuleRules(rule=my_rule, expansion=my_expansion))

Each field is a function of the module. The function in the last column looks it up and refuses a module without it:

    rule, residual         first order: how far module(x), or x + module(x), moves         first_order.py layer_of
    local, local_residual  the same, tighter: used where local=True is asked for           first_order.py layer_of
    chain                  the modules and links it is composed of; all else follows       links.py       layer_of, ...
    trunk                  for a whole model: its links up to the linear head, the head    first_order.py classifier_of
    expansion              second order: the gain of its linearisation, and the remainder  curvature.py   expansion_of
    activation             for a scalar activation: its slopes and how they change         activations.py activation_of
    rounding               how far the served module is from the float64 one               rounding.py    roundings_of
    split                  softmax attention: how queries, keys and values are made        zoo/attention/softmax/qkv.py
    mixing                 softmax attention: rules with another mixing of the values      attention/softmax/rules.py
    shapes                 shapes of its parameters and buffers that the proofs assume     hypotheses.py

A module needs `rule` or `chain`, and `shapes` if it has parameters or buffers of its own. Every other field may be
missing; a method that needs it then refuses the module or does without. Look-up is by the exact type: a subclass with
another `forward` would inherit a false proof.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor, nn

from certizoo import UserError
from zoo.bounds import integrity
from zoo.bounds.contracts import Activation, Expand, Layer, Node, Precision, Rounding
from zoo.bounds.hypotheses import Shapes, fault_of_numbers, fault_of_shapes, unstated

M = TypeVar("M", bound=nn.Module)
M_contra = TypeVar("M_contra", bound=nn.Module, contravariant=True)


class Link(Protocol):
    """A link of a chain that is not a module: a residual sum, an affine map (links.py)."""

    def __call__(self, x: Tensor, /) -> Tensor: ...

    def layer(self, local: bool) -> Layer:
        """Return the first-order rule."""
        ...

    def nodes(self) -> list[Node]:
        """Return the second-order nodes, with local first-order rules."""
        ...

    def roundings(self, precision: Precision) -> list[Rounding]:
        """Return one rounding per node."""
        ...


Links = Sequence[nn.Module | Link]
"""The parts of a module, in order."""


@dataclass(frozen=True, kw_only=True)
class ModuleRules(Generic[M_contra]):
    """All that is proved about one module type; the head of this file explains the fields. None: nothing is known."""

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


NOTHING: ModuleRules[nn.Module] = ModuleRules()
_TABLE: dict[type[nn.Module], ModuleRules[Any]] = {}


def register(kind: type[M], rules: ModuleRules[M]) -> None:
    """Enter the rules of modules of exactly this type. A type is registered once, with all its rules.

    `ModuleRules()` marks a part that only the rules around it read. Every module of a certified model must be torch's
    own or registered.
    """
    if _TABLE.get(kind, NOTHING) != NOTHING:
        raise ValueError(
            f"{kind.__module__}.{kind.__qualname__} is registered already; pass all of its rules in one call"
        )
    _TABLE[kind] = rules
    integrity.KNOWN.add(kind)


def rules_of(module: nn.Module) -> ModuleRules[Any]:
    """Return the rules of `module`, or NOTHING for an unknown type. Raise `NoRule` if the module was altered."""
    refuse_altered(module)
    return _TABLE.get(type(module), NOTHING)


def types_where(wanted: Callable[[ModuleRules[Any]], Any]) -> list[type[nn.Module]]:
    """Return every type whose rules match, such as `lambda rules: rules.local`. Tests enumerate them."""
    found = [kind for kind, rules in _TABLE.items() if wanted(rules)]
    return sorted(found, key=lambda kind: f"{kind.__module__}.{kind.__qualname__}")


def has_rules(model: object) -> bool:
    """Return whether the model as a whole is of a type that rules describe, or no module at all."""
    return not isinstance(model, nn.Module) or _TABLE.get(integrity.kind_of(model), NOTHING).trunk is not None


class NoRule(UserError):
    """The model holds modules for which nothing is proved; `lacking` are their paths, types and reasons."""

    def __init__(self, module: nn.Module, reason: str = "", path: str = "") -> None:
        kind = type(module)
        where = f"{path}: " if path else ""
        named = f"{where}{kind.__module__}.{kind.__qualname__}"
        self.module_type = kind
        self._tell([(named, reason or "no rule is proved for this module type")])

    def _tell(self, faults: Sequence[tuple[str, str]]) -> None:
        self.lacking = tuple(dict.fromkeys(faults))
        more = "" if len(self.lacking) == 1 else f"{len(self.lacking)} modules, "
        listed = "; ".join(f"NoRule({named}): {reason}" for named, reason in self.lacking)
        UserError.__init__(
            self,
            f"{more}{listed}; certificates need a rule for every module; `certizoo explain` and certify.explain list "
            "all layers, and CONTRIBUTING.md, 'how to add an attention', says how to add one",
        )

    def and_also(self, others: Sequence["NoRule"]) -> "NoRule":
        """Return this error with the faults of others, too."""
        self._tell([*self.lacking, *(fault for other in others for fault in other.lacking)])
        return self


A = TypeVar("A")
B = TypeVar("B")


def together(f: Callable[[A], B], parts: Iterable[A]) -> list[B]:
    """Return f of every part. Raises one NoRule that lists all parts without an answer."""
    found, lacking = list[B](), list[NoRule]()
    for part in parts:
        try:
            found.append(f(part))
        except NoRule as fault:
            lacking.append(fault)
    if lacking:
        raise lacking[0].and_also(lacking[1:])
    return found


def expect(part: nn.Module, *kinds: type[nn.Module]) -> None:
    """Check that `part` is unaltered and exactly of one of `kinds`.

    A rule that reads the weights of a part calls this, since it is proved for those types only. Raises `NoRule`.
    """
    refuse_altered(part)
    if type(part) not in kinds:
        raise NoRule(part, f"a {' or '.join(kind.__name__ for kind in kinds)} was expected in its place")


def refuse_altered(module: nn.Module, path: str = "") -> None:
    """Refuse a module that is another function than the one its rules describe. Raises `NoRule`.

    Causes are a hook, a patched method, an object that poses as a number (integrity.py), or a weight of another shape
    (hypotheses.py).
    """
    if fault := integrity.fault_of(module) or fault_of_shapes(module, _shapes(module)):
        raise NoRule(module, fault, path)


def refuse_unknown(module: nn.Module, path: str = "") -> None:
    """Refuse an unknown type, and numbers of unknown shapes or outside the range of the proofs. Raises `NoRule`.

    This also covers parts that no rule asks about.
    """
    if type(module) not in integrity.KNOWN:
        raise NoRule(module, path=path)
    if fault := unstated(module, shapes := _shapes(module)) or fault_of_numbers(module, shapes):
        raise NoRule(module, fault, path)


def _shapes(module: nn.Module) -> Shapes:
    """Return the stated shapes, also for a module with parametrised weights, whose type is torch's."""
    stated = _TABLE.get(integrity.kind_of(module), NOTHING).shapes
    return {} if stated is None else stated(module)
