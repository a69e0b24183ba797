"""Standard training: L = CE(f(x), y)."""

from torch import Tensor

from trainers.objectives.probe import Probe, Terms, accuracy


def clean(probe: Probe, images_BCHW: Tensor, labels_B: Tensor) -> Terms:
    """Return the cross-entropy on unmodified images; `acc` is clean accuracy."""
    logits_BK = probe.forward(images_BCHW)
    return {"loss": probe.cross_entropy(logits_BK, labels_B), "acc": accuracy(logits_BK, labels_B)}
