"""Distillation (Hinton et al. 2015, https://arxiv.org/abs/1503.02531): a frozen teacher's soft targets beside labels.

    L = (1 - alpha) CE( z, y ) + alpha T^2 KL( p_t || p ),     p_t = softmax(z_t / T),  p = softmax(z / T)

It replaces CE in any objective that takes soft labels. z_t are the teacher's logits before an attack, so that in
adversarial training the student answers on x' as the teacher does on x (ARD: Goldblum et al. 2020,
https://arxiv.org/abs/1905.09747; RSLAD: Zi et al. 2021, https://arxiv.org/abs/2108.07969). The attack climbs the same
loss as without a teacher.

Letters: B images, K classes.
"""

from torch import Tensor
from torch.nn import functional as F

from trainers.settings import DistillConfig


def distilled(config: DistillConfig, teacher_BK: Tensor, loss: Tensor, logits_BK: Tensor) -> Tensor:
    """Return L from `loss`, CE(z, y), and z."""
    log_p_t_BK = (teacher_BK.to(logits_BK) / config.temperature).log_softmax(dim=1)
    log_p_BK = (logits_BK / config.temperature).log_softmax(dim=1)
    kl = F.kl_div(log_p_BK, log_p_t_BK, reduction="batchmean", log_target=True)
    return (1 - config.alpha) * loss + config.alpha * config.temperature**2 * kl
