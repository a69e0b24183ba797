"""The rounding of torch in the products of the core: as in zoo/bounds/products.py, by moduli that do not cancel.

With K, Q and V the longest key, query and value of an image, an offset that all share included, the change of a score
is computed from terms whose moduli add up to s (2 K |eta^q_i| + (Q + kappa K) |eta^k_k|), and so is its mean under the
row of P. The core's output adds those, weighted by P and 2 V, to P eta^v. Proof: docs/proofs.md#rounding-of-products.

Letters: as in core.py.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from zoo.arithmetic import gamma
from zoo.attention.theory.core import Core

OPERATIONS = 80  # all except sums over the width of a head and over tokens; those of the softmax included


def terms_rounding(core: Core) -> float:
    """Return gamma of all operations that the core's maps and forms add up in one direction."""
    tokens, width = core.p.shape[-1], core.q.shape[-1]
    return gamma(4 * (tokens + width) + OPERATIONS)


@dataclass(frozen=True)
class Moduli:
    """The moduli s (2 K + Q + kappa K), V with gain, |P|_F and |mixed|_F of the worst head: (B,) each."""

    scores: Tensor
    values: Tensor
    p: Tensor
    mixed: Tensor

    @classmethod
    def of(cls, core: Core, v: Tensor) -> "Moduli":
        """Measure the moduli; v are the values as they are, not centred."""
        keys, queries, values = (_longest(one) for one in (core.k, core.q, core.gain_H[:, None, None] * v))
        scores = core.s * (2 * keys + queries + abs(core.score.kappa) * keys)
        mixed = core.mixed.expand(core.p.shape)
        return cls(scores, values, *(one.norm(dim=(-2, -1)).amax(-1) for one in (core.p, mixed)))

    def of_map(self) -> Tensor:
        """Return | |J| | of the core: (B,)."""
        return 4 * self.values * self.scores * (1 + self.p) + self.mixed


def _longest(x_BHNO: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x_BHNO, dim=-1).amax((-2, -1))
