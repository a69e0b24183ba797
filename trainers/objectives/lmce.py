"""Linearised-margin cross-entropy: it lowers the first-order term of the adjoint certificate (docs/proofs.md#lmce).

    L = CE( z_i + eps_t ||grad_x (z_y - z_j)|| 1[i != y],  y ),      j = the runner-up,  eps_t = eps min(1, t / ramp)

Every wrong logit is raised by the margin's first-order loss in the ball of radius eps_t; t is the share of the training
that is done. For some images j is a random wrong class; otherwise the gradients of the other margins would grow.

Letters: B images, K classes.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from trainers.objectives.probe import Probe, Terms, accuracy, wide

TINY = 1e-12  # under the root, which has no derivative at 0
Choice = Callable[[Tensor, Tensor], Tensor]  # (logits_BK, labels_B) -> rivals_B


def lmce(probe: Probe, images_BCHW: Tensor, labels_B: Tensor) -> Terms:
    """Return `loss`; `acc`, clean accuracy; `slope`, the mean of ||grad_x (z_y - z_j)||. Proof: docs/proofs.md#lmce."""
    logits_BK, slope_B = probe.through(margin_slopes, images_BCHW, labels_B, probe.settings.random_rivals)
    wrong_BK = 1 - F.one_hot(labels_B, logits_BK.shape[1])
    loss = probe.cross_entropy(wide(logits_BK) + probe.eps * wide(slope_B)[:, None] * wrong_BK, labels_B)
    return {"loss": loss, "acc": accuracy(logits_BK, labels_B), "slope": slope_B.detach().mean()}


def margin_slopes(
    model: nn.Module, images_BCHW: Tensor, labels_B: Tensor, random_rivals: float
) -> tuple[Tensor, Tensor]:
    """Return logits_BK and ||grad_x (z_y - z_j)|| (B,), both differentiable in the weights."""
    choose = partial(rivals, random_share=random_rivals)
    logits_BK, slope_BCHW, _ = margin_gradients(model, images_BCHW, labels_B, choose)
    return logits_BK, length(slope_BCHW)


def margin_gradients(
    model: nn.Module, images_BCHW: Tensor, labels_B: Tensor, choose: Choice
) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits_BK and grad_x (z_y - z_j) (B, C, H, W), both differentiable, and j = choose(logits, labels).

    The gradient is taken inside the one forward pass that the engine sees. The fused attention kernels have no second
    derivative, so the plain form is used. Embedded words bring their own graph, through which they learn.
    """
    x_BCHW = images_BCHW if images_BCHW.requires_grad else images_BCHW.detach().requires_grad_()
    with sdpa_kernel(SDPBackend.MATH):
        logits_BK: Tensor = model(x_BCHW)
        rivals_B = choose(logits_BK.detach(), labels_B)
        pair_B2 = logits_BK.gather(1, torch.stack([labels_B, rivals_B], dim=1))
        (slope_BCHW,) = torch.autograd.grad((pair_B2[:, 0] - pair_B2[:, 1]).sum(), x_BCHW, create_graph=True)
    return logits_BK, slope_BCHW, rivals_B


def length(g_BCHW: Tensor) -> Tensor:
    """Return ||g|| (B,), with a derivative at 0."""
    return (g_BCHW.flatten(1).square().sum(1) + TINY).sqrt()


def rivals(logits_BK: Tensor, labels_B: Tensor, random_share: float) -> Tensor:
    """Return the largest wrong class (B,); for a random share of the images, any wrong class uniformly."""
    runner_up_B = logits_BK.scatter(1, labels_B[:, None], -torch.inf).argmax(dim=1)
    if not random_share:
        return runner_up_B
    classes = logits_BK.shape[1]
    random_B = (labels_B + torch.randint(1, classes, labels_B.shape, device=labels_B.device)) % classes
    drawn_B = torch.rand(labels_B.shape, device=labels_B.device) < random_share
    return torch.where(drawn_B, random_B, runner_up_B)
