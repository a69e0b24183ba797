"""Logit annealing (Lai et al. 2025, https://arxiv.org/abs/2505.15174), for networks with bounded norms.

    p = softmax( (z - xi u_y) / T ),      L = -T (1 - p_y)^gamma log p_y

u_y is 1 at the label and 0 elsewhere, xi the `offset` that a margin must exceed, T the `temperature`. The factor (1 -
p_y)^gamma ignores images whose margin is large: small networks cannot give every image a large margin and would
otherwise spend their capacity on these. xi is in units of logits, so it is useful only if something else (caps, the
hinge, AOL or orthogonal layers) bounds the network's Lipschitz constant.

Letters: B images, K classes.
"""

from torch import Tensor
from torch.nn import functional as F

from trainers.objectives.probe import Probe, Terms, accuracy, wide


def logit_annealing(probe: Probe, images_BCHW: Tensor, labels_B: Tensor) -> Terms:
    """Return `loss`; `acc`, clean accuracy; `kept`, the mean of (1 - p_y)^gamma.

    Proof: docs/proofs.md#margin-losses.
    """
    settings = probe.settings
    logits_BK = wide(probe.forward(images_BCHW))
    chosen_BK = F.one_hot(labels_B, logits_BK.shape[1])
    log_p_BK = F.log_softmax((logits_BK - settings.offset * chosen_BK) / settings.temperature, dim=1)
    log_p_B = log_p_BK.gather(1, labels_B[:, None])[:, 0]
    kept_B = (-log_p_B.expm1()) ** settings.gamma
    loss = -(settings.temperature * kept_B * log_p_B).mean()
    return {"loss": loss, "acc": accuracy(logits_BK, labels_B), "kept": kept_B.detach().mean()}
