"""From a radius of embeddings to words: the substitutions of single words that it covers.

    share of pairs (j, w), w one of the K words nearest to word i_j, with ||e(w) - e(i_j)||_2 <= radius

A sentence in which one such word replaces another lies in the certified ball, in L2 and in Linf, so that it keeps its
class. The nearest words are candidates for synonyms, no more: training decides what lies near. Unknown words are not
replaced, nor do they replace.

Letters: n known words of a sentence, V words of the vocabulary, D width, K neighbours.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from zoo.models.sentences import embed_of

COLUMN = "substitutions"
NEIGHBOURS = 8
KNOWN = 2  # the first number of a word; 0 is padding, 1 an unknown word
# Two evaluations of float32's sigmoid at one number, in tensors of other shapes, differ by less than half of this.
ROUNDING = 2.0**-20


def counter(model: nn.Module) -> Callable[[Sequence[int], float], float] | None:
    """Return the share for (numbers of a sentence's words, its radius); None for a model of images."""
    if (embed := embed_of(model)) is None:
        return None
    embedded_VD = embed.words.detach().sigmoid().double()

    def share(numbers: Sequence[int], radius: float) -> float:
        known = [number for number in numbers if number >= KNOWN]
        if not known or radius <= 0:
            return 0.0
        slack = ROUNDING * math.sqrt(len(numbers) * embedded_VD.shape[1])  # all entries are evaluated again
        return float((nearest(embedded_VD, known) + slack <= radius).double().mean())

    return share


def nearest(embedded_VD: Tensor, numbers: Sequence[int]) -> Tensor:
    """Return the distances of words to their nearest others: (n, K), or fewer in a small vocabulary."""
    own_NV = torch.cdist(embedded_VD[list(numbers)], embedded_VD, compute_mode="donot_use_mm_for_euclid_dist")
    own_NV[:, :KNOWN] = torch.inf
    own_NV[range(len(numbers)), list(numbers)] = torch.inf
    count = min(NEIGHBOURS, len(embedded_VD) - KNOWN - 1)
    return own_NV.topk(count, largest=False).values
