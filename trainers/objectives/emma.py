"""EMMA (Hu et al. 2023, https://arxiv.org/abs/2301.12549) on linearised margins: to the boundary and no further.

    L = CE( z_i + e_i ||grad_x (z_y - z_j)|| 1[i != y],  y ),      j = the runner-up,
    e_i = min( eps_t, max(0, z_y - z_i) / ||grad_x (z_y - z_j)|| ),      a constant for the gradient

`lmce` raises every wrong logit by the most that it can gain in the ball of radius eps_t. EMMA raises it at most to z_y,
so an unproved image counts as one on the boundary, and a hopeless image does not count more. The paper uses Lipschitz
constants of pairs of classes in place of the norms.

Letters: B images, K classes.
"""

from torch import Tensor
from torch.nn import functional as F

from trainers.objectives.lmce import TINY, margin_slopes
from trainers.objectives.probe import Probe, Terms, accuracy, wide


def emma(probe: Probe, images_BCHW: Tensor, labels_B: Tensor) -> Terms:
    """Return `loss`; `acc` and `slope` as in `lmce`; `reach`, the mean of min_i e_i / eps_t over wrong classes i.

    `reach` is 1 where the ball changes no decision. Proof: docs/proofs.md#margin-losses.
    """
    logits_BK, slope_B = probe.through(margin_slopes, images_BCHW, labels_B, probe.settings.random_rivals)
    logits_BK, slope_B = wide(logits_BK), wide(slope_B)
    wrong_BK = 1 - F.one_hot(labels_B, logits_BK.shape[1])
    margin_BK = (logits_BK.gather(1, labels_B[:, None]) - logits_BK).detach().clamp_min(0)
    e_BK = (margin_BK / slope_B.detach()[:, None]).clamp_max(probe.eps)
    loss = probe.cross_entropy(logits_BK + e_BK * slope_B[:, None] * wrong_BK, labels_B)
    least_B = e_BK.scatter(1, labels_B[:, None], probe.eps).amin(dim=1)
    reach = least_B.mean() / max(probe.eps, TINY)
    return {"loss": loss, "acc": accuracy(logits_BK, labels_B), "slope": slope_B.detach().mean(), "reach": reach}
