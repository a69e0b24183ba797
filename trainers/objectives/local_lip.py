"""Training with local Lipschitz bounds (Huang et al. 2021, https://arxiv.org/abs/2111.01395, section 3).

    L = CE( z_k + r ||(w_y - w_k) D||,  y ) + objective.sparsity S,    r >= ||h' - h||,  D = diag(what can change)

h is the last hidden layer and w the rows of the head. r and D belong to the ball of radius eps_t around each image
(zoo/models/hidden_radius.py; r is an estimate here). S is the paper's loss that makes more entries of all layers
constant in the ball. eps_t = objective.eps, reached after `ramp`.

Letters: B images, K classes, F units of the last hidden layer, z logits.
"""

from torch import Tensor

from trainers.objectives.probe import Probe, Terms, accuracy, wide
from zoo.models.convnet import ConvNet
from zoo.models.hidden_radius import reach

TINY = 1e-24  # under the root, which has no derivative at 0


def local_lip(probe: Probe, images_BCHW: Tensor, labels_B: Tensor) -> Terms:
    """Return `loss`; `acc`, clean accuracy; `robust`, the share of images whose margins all survive.

    For models in `zoo.models.hidden_radius`. Proof: docs/proofs.md#lipschitz-losses.
    """
    logits_BK, worst_BK, sparsity_B = probe.through(worst_logits, images_BCHW, labels_B, probe.eps)
    loss = probe.cross_entropy(wide(worst_BK), labels_B) + probe.settings.sparsity * wide(sparsity_B).mean()
    return {"loss": loss, "acc": accuracy(logits_BK, labels_B), "robust": accuracy(worst_BK, labels_B)}


def worst_logits(model: ConvNet, images_BCHW: Tensor, labels_B: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits_BK; the same with each wrong one raised by the possible loss of its margin; S (B,)."""
    found = reach(model, images_BCHW, eps, local=True)
    head_KF = model.head.weight
    # D squared equals D, entries of 0 and 1. The label's own difference is 0 and must not reach the root.
    square_BK = ((head_KF[labels_B][:, None] - head_KF).square() @ found.moving_BF[:, :, None]).squeeze(2)
    growth_BK = square_BK.clamp_min(TINY).sqrt() * found.radius_B[:, None]
    worst_BK = found.logits_BK + growth_BK.scatter(1, labels_B[:, None], 0.0)
    return found.logits_BK, worst_BK, found.sparsity_B
