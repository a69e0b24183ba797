"""GloRo (Leino et al. 2021, https://arxiv.org/abs/2102.08452, section 3): one more class, bottom, for "not robust".

    z_bot = max_{k != j} ( z_k + eps_t K_jk ),     j = argmax z,     K_jk = ||w_j - w_k|| Lip,
    L = CE( z, y ) + beta KL( (p, 0) || q ),       p = softmax z,     q = softmax (z, z_bot)

w are the rows of the head. Lip is the Lipschitz constant up to the head, an estimate here
(zoo/models/hidden_radius.py). eps_t is objective.eps, reached after `ramp`. If Lip were a bound, an image with
z_bot < z_j would be certified. The divergence is log(1 + e^(z_bot - lse z)): with beta = 1 the loss is the paper's
CE( (z, z_bot), y ); with any other beta it is the paper's TRADES variant, which weighs robustness against accuracy.

Letters: B images, K classes, F units of the last hidden layer.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from trainers.objectives.probe import Probe, Terms, accuracy, wide
from zoo.models.convnet import ConvNet
from zoo.models.hidden_radius import reach


def gloro(probe: Probe, images_BCHW: Tensor, labels_B: Tensor) -> Terms:
    """Return `loss`; `acc`, clean accuracy; `robust`, the share that is correct and not bottom.

    For models in `zoo.models.hidden_radius`. Proof: docs/proofs.md#lipschitz-losses.
    """
    logits_BK, bottom_B = probe.through(with_bottom, images_BCHW, probe.eps)
    wide_BK = wide(logits_BK)
    kl_B = F.softplus(wide(bottom_B) - wide_BK.logsumexp(dim=1))
    loss = F.cross_entropy(wide_BK, labels_B) + probe.settings.beta * kl_B.mean()
    with torch.no_grad():
        largest_B, predicted_B = logits_BK.max(dim=1)
        robust = ((predicted_B == labels_B) & (bottom_B < largest_B)).float().mean()
    return {"loss": loss, "acc": accuracy(logits_BK, labels_B), "robust": robust}


def with_bottom(model: ConvNet, images_BCHW: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return logits_BK and z_bot (B,)."""
    found = reach(model, images_BCHW, eps, local=False)
    logits_BK, radius_B = found.logits_BK, found.radius_B
    predicted_B = logits_BK.argmax(dim=1)
    head_KF = model.head.weight
    growth_BK = (head_KF[predicted_B][:, None] - head_KF).norm(dim=2) * radius_B[:, None]
    return logits_BK, (logits_BK + growth_BK).scatter(1, predicted_B[:, None], -torch.inf).amax(dim=1)
