"""Training with local Lipschitz bounds (Huang et al. 2021, https://arxiv.org/abs/2111.01395, section 3):

    L = CE( z_k + r ||(w_y - w_k) D||,  y ),     r >= ||h' - h||,   D = diag(entries of h that can change)

h is the last hidden layer and w the rows of the head; r and D belong to the ball of radius eps_t around each image
(zoo/models/reach.py; r is an estimate here); eps_t = objective.eps, reached after `ramp`. The paper's loss that widens
the dead zones of ReLU_theta is left out.

Letters: B images, K classes, F units of the last hidden layer, z logits.
"""

from torch import Tensor

from trainers.objectives.probe import Probe, Terms, accuracy, wide
from zoo.models.convnet import ConvNet
from zoo.models.reach import reach

TINY = 1e-24  # under the root, which has no derivative at 0


def local_lip(probe: Probe, images_BCHW: Tensor, labels_B: Tensor) -> Terms:
    """`acc` is clean accuracy, `robust` the share whose margins all survive. For models in `zoo.models.reach`.

    Proof: docs/proofs.md#lipschitz-losses.
    """
    logits_BK, worst_BK = probe.through(worst_logits, images_BCHW, labels_B, probe.eps)
    loss = probe.cross_entropy(wide(worst_BK), labels_B)
    return {"loss": loss, "acc": accuracy(logits_BK, labels_B), "robust": accuracy(worst_BK, labels_B)}


def worst_logits(model: ConvNet, images_BCHW: Tensor, labels_B: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """logits_BK, and with each wrong one what its margin to the label can lose."""
    logits_BK, radius_B, d_BF = reach(model, images_BCHW, eps, local=True)
    head_KF = model.head.weight
    # Squares against D: entries of 0 and 1. The label's own difference is 0 and must not meet the root.
    square_BK = ((head_KF[labels_B][:, None] - head_KF).square() @ d_BF[:, :, None]).squeeze(2)
    growth_BK = square_BK.clamp_min(TINY).sqrt() * radius_B[:, None]
    return logits_BK, logits_BK + growth_BK.scatter(1, labels_B[:, None], 0.0)
