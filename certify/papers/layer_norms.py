"""The largest singular values of W_Q, W_K, W_V in every attention layer l: Figure 2a of SpecFormer.

    max_h ||W_Q^{l,h}||,   max_h ||W_K^{l,h}||,   max_h ||W_V^{l,h}||      over the heads h, as in the penalty (eq. 14)

Weights are the served ones (caps folded), their norms are computed in float64 and rounded up by a relative 1e-9.
"""

import pandas as pd
from torch import nn

from zoo.penalty import HasSpectralTerms
from zoo.spectral import sigma_upper

WEIGHTS = {"q": "W_Q", "k": "W_K", "v": "W_V"}
COLUMNS = ("layer", "module", "weight", "heads", "sigma_max")


def sigma_max(baked: nn.Module) -> pd.DataFrame:
    """Return one row for each layer (from 1, in the order of the modules) and weight of a float64 model (`bake`).

    Layers without such a weight have no row: conv nets and CoViT have none, tied L2 attention has no W_K.
    """
    records: list[tuple[int, str, str, int, float]] = []
    layer = 0
    for name, module in baked.named_modules():
        terms = list(module.spectral_terms()) if isinstance(module, HasSpectralTerms) else []
        heads = {WEIGHTS[branch]: weight_HOD for branch, weight_HOD, _ in terms if branch in WEIGHTS}
        layer += bool(heads)
        for weight, weight_HOD in heads.items():
            records.append((layer, name, weight, len(weight_HOD), float(sigma_upper(weight_HOD).max())))
    return pd.DataFrame(records, columns=list(COLUMNS))


def largest(table: pd.DataFrame) -> dict[str, float]:
    """Return the largest value over all layers, by weight."""
    return {
        str(weight): float(value) for weight, value in table.groupby("weight", sort=False)["sigma_max"].max().items()
    }


def note(table: pd.DataFrame) -> str:
    """Return a note about a missing weight: 'none' without such weights, or 'is W_Q'."""
    if table.empty:
        return "none"
    return "" if "W_K" in set(table["weight"]) else "is W_Q"
