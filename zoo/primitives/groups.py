"""Group normalisation (Wu and He 2018, https://arxiv.org/abs/1803.08494): LayerNorm of every group, then a factor.

    y = gamma_c (u / sqrt(|u|^2 / n + eps)) + beta_c,    u = x_g - mean(x_g),  n entries in a group

A group is a token of LayerNorm (docs/proofs.md#layer-norm). This file has the first-order rule alone. Captured models
use LayerNorm itself on reshaped images, with all of its rules. Letters: B images, G groups, N entries of a group.
"""

import math

from torch import Tensor, nn

from zoo.bounds.contracts import Bound, Layer
from zoo.bounds.hypotheses import Shapes
from zoo.bounds.rule_table import ModuleRules, NoRule, register
from zoo.layers.norms import bounded_normalisation


def group_norm(module: nn.GroupNorm) -> Layer:
    """Return max |gamma| / sqrt(eps) times the rule of the bounded normalisation with R^2 = n eps."""
    if not module.eps > 0:
        raise NoRule(module, f"its eps is {module.eps}; set one above 0, such as 1e-5")
    gamma = 1.0 if module.weight is None else float(module.weight.detach().abs().max())
    gain = gamma / math.sqrt(module.eps)

    def layer(x: Tensor) -> tuple[Tensor, Bound]:
        y = module(x)  # refuses channels that are not a multiple of the groups
        x_BGN = x.reshape(len(x), module.num_groups, -1)
        centred = x_BGN - x_BGN.mean(-1, keepdim=True)
        inner = bounded_normalisation(centred, math.sqrt(x_BGN.shape[-1] * module.eps))
        return y, lambda r: gain * inner(r)

    return layer


def group_norm_shapes(module: nn.GroupNorm) -> Shapes:
    """Return one number a channel."""
    return dict.fromkeys(("weight", "bias"), (module.num_channels,))


register(nn.GroupNorm, ModuleRules(rule=group_norm, shapes=group_norm_shapes))
KINDS = (nn.GroupNorm,)
