"""Attacks behind one interface: images in [0,1] go in, images within the threat model come out.

    from certizoo.attacks import AttackConfig, make, pgd
    attack = AttackConfig(norm="l2", eps=0.5, steps=20, restarts=2, loss="margin")
    adversarial_BCHW = pgd(model, images_BCHW, labels_B, attack)
    adversarial_BCHW = make({"kind": "pgd", "norm": "l2", "eps": 0.5}).run(model, images_BCHW, labels_B)

Models map images to logits.
"""

from certizoo.attacks.attack import Attack, Draws
from certizoo.attacks.kinds import KINDS, make
from certizoo.attacks.loop import AttackConfig, fgsm, pgd

__all__ = ["KINDS", "Attack", "AttackConfig", "Draws", "fgsm", "make", "pgd"]
