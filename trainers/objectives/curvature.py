"""Linearised-margin cross-entropy with a second-order term: the change of the margin's slope within the ball.

    L = CE( z_i + (eps_t ||g(x)|| + c/2 eps_t ||g(x + eps v) - g(x)||) 1[i != y],  y ),
    g(x) = grad_x (z_y - z_j)(x),      j = the runner-up at x,      v = g(x) / ||g(x)||, a constant for the gradient

To second order the difference is eps H v, H the margin's Hessian. Its length times eps_t/2 is the loss within the ball
beyond the slope, in the direction of largest curvature (Moosavi-Dezfooli et al. 2019, https://arxiv.org/abs/1811.09716,
penalise the square). c is objective.curvature. It costs one more double backward than `lmce`.

Letters: B images, K classes.
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainers.objectives.lmce import length, margin_gradients, rivals
from trainers.objectives.probe import Probe, Terms, accuracy, wide
from zoo.layers.cap import caps_still


def curvature(probe: Probe, images_BCHW: Tensor, labels_B: Tensor) -> Terms:
    """Return `loss`; `acc` and `slope` as in `lmce`; `bend`, the mean of ||g(x + eps v) - g(x)||.

    Proof: docs/proofs.md#lmce.
    """
    settings = probe.settings
    logits_BK, slope_B, bend_B = probe.through(
        slopes_and_bends, images_BCHW, labels_B, settings.random_rivals, settings.eps
    )
    lost_B = probe.eps * (wide(slope_B) + settings.curvature / 2 * wide(bend_B))
    wrong_BK = 1 - F.one_hot(labels_B, logits_BK.shape[1])
    return {
        "loss": probe.cross_entropy(wide(logits_BK) + lost_B[:, None] * wrong_BK, labels_B),
        "acc": accuracy(logits_BK, labels_B),
        "slope": slope_B.detach().mean(),
        "bend": bend_B.detach().mean(),
    }


def slopes_and_bends(
    model: nn.Module, images_BCHW: Tensor, labels_B: Tensor, random_rivals: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits_BK, ||g(x)|| (B,) and ||g(x + eps v) - g(x)|| (B,), differentiable in the weights.

    Both passes drop the same paths, and only the first advances the power iteration of capped layers.
    """
    choose = partial(rivals, random_share=random_rivals)
    with torch.random.fork_rng([images_BCHW.device] if images_BCHW.is_cuda else []):
        logits_BK, slope_BCHW, rivals_B = margin_gradients(model, images_BCHW, labels_B, choose)
    slope_B = length(slope_BCHW)
    far_BCHW = images_BCHW + eps * (slope_BCHW / slope_B.view(-1, 1, 1, 1)).detach()
    with caps_still(model):
        _, there_BCHW, _ = margin_gradients(model, far_BCHW, labels_B, lambda *_: rivals_B)
    return logits_BK, slope_B, length(there_BCHW - slope_BCHW)
