"""The public interface to the provable properties of a module: to add rules for a module, and to look them up.

    from zoo.rules import Layer, ModuleRules, affine, register, scaled

    def half(module: Half) -> Layer:
        return scaled(module, 0.5)  # ||x' / 2 - x / 2|| = ||x' - x|| / 2

    register(Half, ModuleRules(rule=half, expansion=affine))

in the file that defines the module. The files of `zoo/bounds` explain what each rule promises: start with
rule_table.py.
"""

from zoo.attention.lipschitz import global_layer
from zoo.attention.softmax.qkv import Split, qkv_split
from zoo.attention.softmax.rules import (
    AttentionRules,
    attention_rules,
    rules_by_split,
    rules_with_mixing,
    softmax_rules,
)
from zoo.bounds.activations import Hinge, Smooth, activation_of
from zoo.bounds.contracts import Activation, Bound, Expand, Expansion, Layer, Node, Precision, Rounded, Rounding
from zoo.bounds.curvature import (
    affine,
    affine_expansion,
    composition,
    expansion_of,
    nodes_of,
    residual_expansion,
    trunk_of,
)
from zoo.bounds.elementwise import elementwise, scalar
from zoo.bounds.first_order import (
    Chain,
    Step,
    chain,
    classifier_of,
    layer_of,
    parts_of,
    radii,
    residual,
    residual_layer_of,
    scaled,
    steps_of,
)
from zoo.bounds.fused import fused
from zoo.bounds.links import Affine, Residual
from zoo.bounds.primitives import centred, factors, function, linear_rounding, matrix_product, mean, plus, product
from zoo.bounds.rounding import composed, exact, exact_module, residual_rounding, roundings_of, trunk_roundings
from zoo.bounds.rule_table import Link, Links, ModuleRules, NoRule, expect, register, rules_of, types_where
from zoo.layers.convolution import conv_norm

__all__ = [
    "Activation",
    "Affine",
    "AttentionRules",
    "Bound",
    "Chain",
    "Expand",
    "Expansion",
    "Hinge",
    "Layer",
    "Link",
    "Links",
    "ModuleRules",
    "NoRule",
    "Node",
    "Precision",
    "Residual",
    "Rounded",
    "Rounding",
    "Smooth",
    "Split",
    "Step",
    "activation_of",
    "affine",
    "affine_expansion",
    "attention_rules",
    "centred",
    "chain",
    "classifier_of",
    "composed",
    "composition",
    "conv_norm",
    "elementwise",
    "exact",
    "exact_module",
    "expansion_of",
    "expect",
    "factors",
    "function",
    "fused",
    "global_layer",
    "layer_of",
    "linear_rounding",
    "matrix_product",
    "mean",
    "nodes_of",
    "parts_of",
    "plus",
    "product",
    "qkv_split",
    "radii",
    "register",
    "residual",
    "residual_expansion",
    "residual_layer_of",
    "residual_rounding",
    "roundings_of",
    "rules_by_split",
    "rules_of",
    "rules_with_mixing",
    "scalar",
    "scaled",
    "softmax_rules",
    "steps_of",
    "trunk_of",
    "trunk_roundings",
    "types_where",
]
