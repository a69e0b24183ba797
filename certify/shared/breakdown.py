"""The cost of every step of a model: names for the steps, their costs, and averages over images.

Letters: B images, K steps; e_k the radius and g_k the gradient of the margin after step k.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from certify.shared.certificate import Breakdown
from zoo.arithmetic import nan_to_inf, product
from zoo.bounds.contracts import Layer
from zoo.bounds.first_order import parts_of

if TYPE_CHECKING:
    import pandas as pd

FIRST_ORDER, IN_FRONT = "first order", "radius in front of the cut"
QUANTITIES = ("growth", "share")


def names(model: nn.Module, layers: Iterable[Layer]) -> list[str]:
    """Return the qualified names of each step's modules, such as 'blocks.0.(norm1, attn)'; no name occurs twice."""
    qualified = {module: name for name, module in model.named_modules()}
    found: list[str] = []
    for k, layer in enumerate(layers):
        parts = [part for part in parts_of(layer) if type(part) is not nn.Identity] or list(parts_of(layer))
        words = [part if isinstance(part, str) else qualified.get(part, type(part).__name__) for part in parts]
        name = _joined(words) or f"step {k + 1}"
        found.append(name if name not in found else f"{name} (step {k + 1})")
    return found


def _joined(words: Sequence[str]) -> str:
    """Join names with a common parent: ['a.b', 'a.c'] -> 'a.(b, c)'."""
    if len(words) < 2:
        return "".join(words)
    parents = {word.rpartition(".")[0] for word in words}
    if len(parents) > 1 or parents == {""}:
        return ", ".join(words)
    return f"{parents.pop()}.({', '.join(word.rpartition('.')[2] for word in words)})"


def growth(steps: Sequence[str], radii: Sequence[Tensor]) -> Breakdown:
    """Return e_k / e_{k-1} for radii e_0 .. e_K (B,); the product of all is e_K / e_0."""
    ratios = [after / before for before, after in pairwise(radii)]
    return Breakdown("growth", dict(zip(steps, ratios, strict=True)))


def shares(steps: Sequence[str], gradient_KB: Tensor, radii: Sequence[Tensor], remainder_KB: Tensor) -> Breakdown:
    """Return the parts of the loss min_c [ ||g_c|| e_c + sum_{k>c} rem_k ] of the binding class, at its best cut c.

    The parts are the first order ||g_0|| e_0; what the steps before the cut add to it, ||g_c|| e_c - ||g_0|| e_0;
    and the remainder of every step, 0 before the cut. They add up to 1.

    Gradients ||g_k|| and radii e_k (B,), k = 0 .. K; remainders rem_k(e_{k-1}), k = 1 .. K.
    """
    e_KB = torch.stack(list(radii))
    first_KB = product(gradient_KB, e_KB)
    behind_KB = torch.cat([remainder_KB.flip(0).cumsum(0).flip(0), torch.zeros_like(remainder_KB[:1])])
    loss_KB = nan_to_inf(first_KB + behind_KB)
    cut_B = loss_KB.argmin(0)
    loss_B, first_B = (t.gather(0, cut_B[None])[0] for t in (loss_KB, first_KB))
    lowest_B = torch.minimum(first_KB[0], first_B)
    costs = {FIRST_ORDER: lowest_B / loss_B, IN_FRONT: (first_B - lowest_B) / loss_B}
    for k, name in enumerate(steps):
        costs[name] = torch.where(cut_B <= k, remainder_KB[k] / loss_B, 0.0)
    return Breakdown("share", costs)


def columns(breakdown: Breakdown) -> list[dict[str, float]]:
    """Return one mapping per image from '<quantity>.<step>' to a number.

    The mapping is empty if one value of the image is not finite. The list is empty if there are no steps.
    """
    if not breakdown.costs:
        return []
    costs_BK = torch.stack(list(breakdown.costs.values()), dim=-1)
    keys = [f"{breakdown.quantity}.{name}" for name in breakdown.costs]
    return [
        dict(zip(keys, values, strict=True)) if all(map(math.isfinite, values)) else {} for values in costs_BK.tolist()
    ]


def averaged(table: "pd.DataFrame", eps: float) -> dict[str, Any] | None:
    """Average each step over the correctly classified images with a finite loss; None if the table has no breakdown.

    The mean is geometric where costs multiply.
    """
    for quantity in QUANTITIES:
        keys = [key for key in table.columns if key.startswith(f"{quantity}.")]
        if keys:
            finite = table.loc[table["correct"], keys].astype(float).dropna()
            return {
                "quantity": quantity,
                "eps": eps,
                "images": len(finite),
                "steps": {key.partition(".")[2]: _mean(finite[key], quantity) for key in keys} if len(finite) else {},
            }
    return None


def _mean(values: "pd.Series[float]", quantity: str) -> float:
    if quantity == "growth":
        return math.exp(sum(map(math.log, values)) / len(values)) if (values > 0).all() else 0.0
    return float(values.mean())
