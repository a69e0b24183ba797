"""Adversarial training (Madry et al., https://arxiv.org/abs/1706.06083).

    L = CE(f(x + delta*), y),     delta* ~ argmax over the ball of CE(f(x + delta), y)

The attack approximates delta* with the model in eval mode.
"""

from torch import Tensor

from trainers.objectives.probe import Probe, Terms, accuracy


def pgd_at(probe: Probe, images_BCHW: Tensor, labels_B: Tensor) -> Terms:
    """Return the cross-entropy on adversarial images and the accuracy on them, `acc`.

    Proof: docs/proofs.md#adversarial-losses.
    """
    logits_BK = probe.forward(probe.attack(images_BCHW, labels_B))
    return {"loss": probe.cross_entropy(logits_BK, labels_B), "acc": accuracy(logits_BK, labels_B)}
