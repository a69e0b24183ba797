"""Attention-Fool: an attack that also draws the attention of all queries to one key (Lovisotto et al., CVPR 2022).

    A_lj = mean over heads h and queries n of  s <q_hn, k_hj>          the pull of key j in layer l
    L    = CE + WEIGHT log sum_l sum_j exp A_lj                        a smooth maximum over layers and keys

The paper ("Give me your attention") uses the key of its patch. Here the whole image is free, so the key is the one with
the largest pull. If the softmax saturates, cross-entropy alone has no gradient through the attention; the pull is taken
before the softmax and has one.

Legend: B batch, N tokens, H heads, E width of q and k per head, K classes, J keys of all layers.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from certizoo import UserError
from certizoo.attacks.losses import LOSSES, ce

ATTENTION = "attention"
LOSS_NAMES = (*LOSSES, ATTENTION)
WEIGHT = 1.0  # weight of the pull, which is as large as a logit, like CE; not tuned
Loss = Callable[[Tensor, Tensor], Tensor]


@runtime_checkable
class DotProduct(Protocol):
    """Attention whose score is scale q k^T, up to a constant per row: zoo.attention.softmax."""

    scale: float

    def heads(self, x_BND: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q (B, H, N, E), k (B, H, N, E) and v."""


@contextmanager
def loss_of(name: str, model: nn.Module) -> Iterator[Loss]:
    """Yield the loss of that name; for "attention" it records the model's queries and keys during the block.

    Raises UserError for "attention" if the model has no dot-product attention.
    """
    if name != ATTENTION:
        yield LOSSES[name]
        return
    listened = _attentions(model)
    if not listened:
        raise UserError(f"attack.loss=attention: {type(model).__name__} has no dot-product attention; use margin")
    pulls: list[Tensor] = []

    def listener(content: DotProduct) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        return lambda _, inputs: pulls.append(pull(content, inputs[0]))

    def fool(logits_BK: Tensor, labels_B: Tensor) -> Tensor:
        pull_BJ = torch.cat([pull_BN.reshape(len(logits_BK), -1) for pull_BN in pulls], dim=1)
        pulls.clear()
        return ce(logits_BK, labels_B) + WEIGHT * pull_BJ.to(logits_BK.dtype).logsumexp(dim=1)

    hooks = [module.register_forward_pre_hook(listener(content)) for module, content in listened]
    try:
        yield fool
    finally:
        for hook in hooks:
            hook.remove()


def pull(content: DotProduct, x_BND: Tensor) -> Tensor:
    """Return A_BN: the mean over queries is taken before the product, so that no N x N matrix is formed."""
    q_BHNE, k_BHNE, _ = content.heads(x_BND)
    score_BHN = content.scale * (k_BHNE @ q_BHNE.mean(dim=2).unsqueeze(-1)).squeeze(-1)
    return score_BHN.mean(dim=1)


def _attentions(model: nn.Module) -> list[tuple[nn.Module, DotProduct]]:
    """Return each module that is called with tokens, and the attention that computes their q and k.

    That is the module itself, or its `content` (windows, of which an image's are neighbours in B; gated positions).
    """
    pairs = [(module, getattr(module, "content", module)) for module in model.modules()]
    inner = {id(content) for module, content in pairs if content is not module}
    return [
        (module, content) for module, content in pairs if isinstance(content, DotProduct) and id(module) not in inner
    ]
