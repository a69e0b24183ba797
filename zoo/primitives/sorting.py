"""Sorting within groups: GroupSort (Anil et al. 2019, https://arxiv.org/abs/1811.05381), and its rules.

Sorting never lengthens a difference. At x it is a permutation, which stays the best one within gap_w / sqrt2 of a group
w, where gap_w is the smallest distance between two neighbours of the sorted group. The monotone vectors m form a convex
cone whose points are sorted already, so that for z = sort(x) + G, written in the sorted order,

    |R_w| = |sort(z) - z| <= 2 min_m |z - m| <= 2 (|G_w| - gap_w / sqrt2)_+

R_w has the mean 0 in every group: only g_w less its mean counts. Proof: docs/proofs.md#primitives.

Letters: B images, C classes, W groups of K entries.
"""

import torch
from torch import Tensor, nn

from zoo.arithmetic import OUT, length
from zoo.bounds.activations import beyond
from zoo.bounds.contracts import Bound, Expand, Expansion, Layer
from zoo.bounds.rounding import exact_module
from zoo.bounds.rule_table import ModuleRules, register
from zoo.primitives.pooling import SQRT2, shared


class Sorted(nn.Module):
    """The entries of every group in ascending order: (B, ..., K) -> (B, ..., K)."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sort(-1).values


def sort(module: Sorted) -> Layer:
    """Return the rule: |sort a - sort b| <= |a - b|, group by group, by the rearrangement inequality."""
    return lambda x: (module(x), lambda r: r)


def sort_expansion(module: Sorted) -> Expand:
    """Expand the permutation at x; among equal entries any order serves."""

    def expand(x: Tensor) -> Expansion:
        y, at = x.sort(-1)
        gap = y.diff(dim=-1).amin(-1) / OUT if x.shape[-1] > 1 else torch.full_like(y[..., 0], torch.inf)
        gap_B1W = gap.view(len(x), 1, -1)

        def pull(g: Tensor) -> Tensor:
            return torch.empty_like(g).scatter(-1, at.expand(len(g), *at.shape), g)

        def push(v: Tensor) -> Tensor:
            return v.gather(-1, at.expand(len(v), *at.shape))

        def beta(r: Tensor) -> Tensor:
            """Use (sqrt2 r - gap)_+ / r, which grows with r, as for maxima."""
            reach = SQRT2 * r
            share = beyond(gap_B1W.flatten(1).amin(1).expand(r.shape), reach)
            return torch.where(r > 0, SQRT2 * reach * share, 0.0).nan_to_num(torch.inf)

        def remainder(g: Tensor) -> Bound:
            harm = SQRT2 * length(g - g.mean(-1, keepdim=True)).reshape(*g.shape[:2], 1, -1)
            whole_CB = length(harm.flatten(2))
            return lambda r: shared(harm, gap_B1W, whole_CB, r)

        ones_B = x.new_ones(len(x))
        return Expansion(
            y=y, gain_B=ones_B, beta=beta, remainder=remainder, pull=pull, own_push=push, rounding_B=0 * ones_B
        )

    return expand


register(Sorted, ModuleRules(rule=sort, expansion=sort_expansion, rounding=exact_module))
KINDS = (Sorted,)
