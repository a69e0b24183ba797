"""The facts of softmax attention that follow from its `split`: alone, and with something around its softmax.

    F(X) = merge( mix(softmax(score + bias)) v )        `Around` is what stands around: bias and mix

Windows add a relative position bias (window.py), gated positions mix in a matrix of their own (gpsa.py). They ask for
the rules of their content here: those of its fact `around`, where it has sharper ones, or those of its `split`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from zoo.attention.core_expansion import Around, Measured, Split, bounded, least
from zoo.bounds.curvature import Expand
from zoo.bounds.facts import Facts, M, facts_of
from zoo.bounds.rules import Layer, residual


@dataclass(frozen=True)
class AttentionRules:
    """Each is built when it is asked for; the layers of F (False), or of X + F(X) (True)."""

    published: Callable[[bool], Layer]
    local: Callable[[bool], Layer]
    expand: Callable[[], Expand]


def rules_around(module: Callable[[Tensor], Tensor], content: nn.Module, around: Around) -> AttentionRules:
    """Those of `module`, which is `content` with something around its softmax. Raises `NoRule`."""
    rules: AttentionRules = (facts_of(content).around or by_split)(module, content, around)
    return rules


def by_split(module: Callable[[Tensor], Tensor], content: nn.Module, around: Around) -> AttentionRules:
    """Nothing is published of most attention with something around its softmax: the local rule is the only one."""

    def layer(with_identity: bool) -> Layer:
        measured = Measured(module, content, around).layer
        return residual(measured) if with_identity else measured

    def expand() -> Expand:
        measured = Measured(module, content, around)
        return bounded(measured.expand, measured.layer)

    return AttentionRules(layer, layer, expand)


def attention_facts(rules: Callable[[M], AttentionRules]) -> Facts[M]:
    """All facts of an attention, from its rules."""
    return Facts(
        rule=lambda module: rules(module).published(False),
        residual=lambda module: rules(module).published(True),
        local=lambda module: rules(module).local(False),
        local_residual=lambda module: rules(module).local(True),
        expansion=lambda module: rules(module).expand(),
    )


def softmax_facts(
    rule: Callable[[M], Layer], split: Callable[[M], Split], local: Callable[[M], Layer] | None = None
) -> Facts[M]:
    """All facts of a variant that is known by its published `rule` and its `split`. `local`: another local rule than
    the lesser of the published one and that of the split."""

    def lesser(module: M) -> Layer:
        return least(rule(module), Measured(module, module).layer)

    def expand(module: M) -> Expand:
        return bounded(Measured(module, module).expand, (local or lesser)(module))

    return Facts(rule=rule, local=local or lesser, expansion=expand, split=split)
