"""TRADES (Zhang et al. 2019, https://arxiv.org/abs/1901.08573, eq. 5).

    L = CE(f(x), y) + beta KL( p(x) || p(x') ),     p = softmax f,  beta = 1 / lambda,
    x' ~ argmax over the ball of KL( p(x) || p(x') ), found by the attack in eval mode.

Letters: B images, K classes.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from trainers.objectives.probe import Probe, Terms, accuracy, wide


def trades(probe: Probe, images_BCHW: Tensor, labels_B: Tensor) -> Terms:
    """Return `loss`; `acc`, accuracy on adversarial images; `clean_acc`, on clean ones; `kl`, the divergence.

    beta is `objective.beta`. Both halves go through the model in one pass. Proof: docs/proofs.md#adversarial-losses.
    """
    # Cross-entropy with p(x) for labels is KL(p(x) || p(x')) up to a constant.
    p_BK = wide(probe.predict(images_BCHW)).softmax(dim=1)
    adversarial_BCHW = probe.attack(images_BCHW, p_BK)
    clean_BK, attacked_BK = probe.forward(torch.cat([images_BCHW, adversarial_BCHW])).chunk(2)
    kl = divergence(clean_BK, attacked_BK).mean()
    loss = probe.cross_entropy(clean_BK, labels_B) + probe.settings.beta * kl
    accuracies = {"acc": accuracy(attacked_BK, labels_B), "clean_acc": accuracy(clean_BK, labels_B)}
    return {"loss": loss, **accuracies, "kl": kl.detach()}


def divergence(clean_BK: Tensor, attacked_BK: Tensor) -> Tensor:
    """Return KL( softmax(clean) || softmax(attacked) ), (B,)."""
    log_p_BK, log_q_BK = wide(clean_BK).log_softmax(dim=1), wide(attacked_BK).log_softmax(dim=1)
    return F.kl_div(log_q_BK, log_p_BK, reduction="none", log_target=True).sum(dim=1)
