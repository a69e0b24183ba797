"""Lipschitz-margin training (Tsuzuku et al. 2018, https://arxiv.org/abs/1802.04034, Algorithm 1).

    L = CE( z_k + sqrt(2) eps_t L_f 1[k != y],  y ),     L_f the product of the layers' norms, pixels to logits

Every wrong logit is raised by the most that a margin can lose in the ball. L_f is an estimate here
(zoo/models/hidden_radius.py); eps_t is objective.eps, reached after `ramp`.

Letters: B images, K classes, z logits.
"""

import math

from torch import Tensor
from torch.nn import functional as F

from trainers.objectives.probe import Probe, Terms, accuracy, wide
from zoo.models.convnet import ConvNet
from zoo.models.hidden_radius import reach
from zoo.spectral import sigma_estimate


def lmt(probe: Probe, images_BCHW: Tensor, labels_B: Tensor) -> Terms:
    """Return `loss`; `acc`, clean accuracy; `growth`, sqrt(2) eps L_f. For models in `zoo.models.hidden_radius`.

    Proof: docs/proofs.md#lipschitz-losses.
    """
    logits_BK, growth_B = probe.through(margin_growth, images_BCHW, probe.eps)
    wrong_BK = 1 - F.one_hot(labels_B, logits_BK.shape[1])
    loss = probe.cross_entropy(wide(logits_BK) + wide(growth_B)[:, None] * wrong_BK, labels_B)
    return {"loss": loss, "acc": accuracy(logits_BK, labels_B), "growth": growth_B.detach().mean()}


def margin_growth(model: ConvNet, images_BCHW: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return logits_BK and sqrt(2) eps L_f (B,), the same for all images."""
    found = reach(model, images_BCHW, eps, local=False)
    logits_BK, radius_B = found.logits_BK, found.radius_B
    return logits_BK, math.sqrt(2) * radius_B * sigma_estimate(model.head.weight)
