"""Rules of softmax attention that follow from its `split`: alone, and with mixing around its softmax.

    F(X) = merge( mix(softmax(score + bias)) v )        `Mixing` is the bias and mix around the softmax

Windows add a relative position bias (window.py); gated positions mix in a matrix of their own (gpsa.py). Both look up
the rules of their content here: those of its field `mixing`, where it has tighter ones, or those of its `split`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from zoo.attention.softmax.qkv import AttentionBounds, Mixing, Split, bounded, least, qkv_shapes
from zoo.attention.softmax.rounding import plain_rounding
from zoo.bounds.contracts import Expand, Layer
from zoo.bounds.first_order import residual
from zoo.bounds.hypotheses import Shapes
from zoo.bounds.rule_table import M, ModuleRules, rules_of


@dataclass(frozen=True)
class AttentionRules:
    """Three rules, each built on demand: the layers of F (False) or of X + F(X) (True), and the expansion."""

    published: Callable[[bool], Layer]
    local: Callable[[bool], Layer]
    expand: Callable[[], Expand]


def rules_with_mixing(module: Callable[[Tensor], Tensor], content: nn.Module, mixing: Mixing) -> AttentionRules:
    """Return the rules of `module`, which is `content` with mixing around its softmax. Raises `NoRule`."""
    rules: AttentionRules = (rules_of(content).mixing or by_split)(module, content, mixing)
    return rules


def by_split(module: Callable[[Tensor], Tensor], content: nn.Module, mixing: Mixing) -> AttentionRules:
    """Return the local rule as the only one, since nothing is published for most attention with such mixing."""

    def layer(with_identity: bool) -> Layer:
        measured = AttentionBounds(module, content, mixing).layer
        return residual(measured) if with_identity else measured

    def expand() -> Expand:
        measured = AttentionBounds(module, content, mixing)
        return bounded(measured.expand, measured.layer)

    return AttentionRules(layer, layer, expand)


def attention_rules(rules: Callable[[M], AttentionRules], shapes: Callable[[M], Shapes]) -> ModuleRules[M]:
    """Return all rules of an attention, from its `AttentionRules` and the shapes of its weights."""
    return ModuleRules(
        shapes=shapes,
        rule=lambda module: rules(module).published(False),
        residual=lambda module: rules(module).published(True),
        local=lambda module: rules(module).local(False),
        local_residual=lambda module: rules(module).local(True),
        expansion=lambda module: rules(module).expand(),
    )


def softmax_rules(
    rule: Callable[[M], Layer],
    split: Callable[[M], Split],
    local: Callable[[M], Layer] | None = None,
    shapes: Callable[[M], Shapes] | None = None,
) -> ModuleRules[M]:
    """Return all rules of a variant, from its published `rule` and its `split`.

    `local` replaces the default local rule, the lesser of the published one and that of the split. `shapes` replaces
    the shapes of `QKVAttention`.
    """

    def lesser(module: M) -> Layer:
        return least(rule(module), AttentionBounds(module, module).layer)

    def expand(module: M) -> Expand:
        return bounded(AttentionBounds(module, module).expand, (local or lesser)(module))

    stated: Any = shapes or qkv_shapes
    return ModuleRules(
        rule=rule, local=local or lesser, expansion=expand, split=split, rounding=plain_rounding, shapes=stated
    )


def rules_by_split(split: Callable[[M], Split], shapes: Callable[[M], Shapes] | None = None) -> ModuleRules[M]:
    """Return all rules of a variant from its split alone, where nothing is published. `shapes`: as above."""

    def layer(module: M) -> Layer:
        return AttentionBounds(module, module).layer

    return softmax_rules(layer, split, layer, shapes)
