"""MART (Wang et al. 2020, https://openreview.net/forum?id=rklOg6EFwS): uncertain images weigh more.

    L = BCE(p(x'), y) + beta KL( p(x) || p(x') ) (1 - p_y(x)),     p = softmax f,
    BCE(p, y) = -log p_y - log( 1 - max_{k != y} p_k ),            x' as in PGD-AT

Letters: B images, K classes, z logits.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from trainers.objectives.probe import Probe, Terms, accuracy, wide
from trainers.objectives.trades import divergence


def mart(probe: Probe, images_BCHW: Tensor, labels_B: Tensor) -> Terms:
    """Return `loss`; `acc`, accuracy on adversarial images; `clean_acc`, on clean ones. beta: `objective.beta`.

    Both halves go through the model in one pass. Proof: docs/proofs.md#adversarial-losses.
    """
    adversarial_BCHW = probe.attack(images_BCHW, labels_B)
    clean_BK, attacked_BK = probe.forward(torch.cat([images_BCHW, adversarial_BCHW])).chunk(2)
    sure_B = wide(clean_BK).softmax(dim=1).gather(1, labels_B[:, None]).squeeze(1)
    loss_B = boosted_cross_entropy(attacked_BK, labels_B)
    loss_B = loss_B + probe.settings.beta * divergence(clean_BK, attacked_BK) * (1 - sure_B)
    accuracies = {"acc": accuracy(attacked_BK, labels_B), "clean_acc": accuracy(clean_BK, labels_B)}
    return {"loss": loss_B.mean(), **accuracies}


def boosted_cross_entropy(logits_BK: Tensor, labels_B: Tensor) -> Tensor:
    """Return BCE (B,).

    log(1 - p_j) = logsumexp_{k != j} z_k - logsumexp_k z_k stays finite where p_j rounds to 1.
    """
    z_BK = wide(logits_BK)
    rival_B1 = z_BK.detach().scatter(1, labels_B[:, None], -torch.inf).argmax(dim=1, keepdim=True)
    log_rest_B = z_BK.scatter(1, rival_B1, -torch.inf).logsumexp(dim=1) - z_BK.logsumexp(dim=1)
    return F.cross_entropy(z_BK, labels_B, reduction="none") - log_rest_B
