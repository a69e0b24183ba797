"""Gradient attacks: one loop, two norms. Images in [0,1], logits out; the loop keeps ball and box, never the caller.

from attacks import pgd, fgsm, AttackConfig
adversarial_BCHW = pgd(model, images_BCHW, labels_B, norm="l2", eps=0.5, steps=20, restarts=2, loss="margin")
"""

from attacks.config import AttackConfig
from attacks.loop import fgsm, pgd

__all__ = ["AttackConfig", "fgsm", "pgd"]
