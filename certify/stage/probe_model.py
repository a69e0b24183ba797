"""Certify and attack a few images at a few radii within a time limit, for a model that is still training.

Certificates and attacks are those of the stage, without the search for each image's radius, which takes longest. The
shares are for choosing between trials; none of them enters a certificate.
"""

import time
from collections.abc import Iterable
from dataclasses import replace

from torch import Tensor, nn

from certify.api import certifier
from certify.stage.outcomes import confirmed, survives
from certify.stage.settings import Settings
from zoo.models.sentences import by_length


def certify_probe(
    model: nn.Module, batches: Iterable[tuple[list[str], Tensor, Tensor]], asked: Settings, seconds: float
) -> dict[str, float]:
    """Return {"certified_images", "certified_acc.EPS", "certified_near.EPS", "pgd_acc.EPS"} as shares of those images.

    Stops after the first batch that ends past the time limit. `certified_near` changes smoothly where shares of few
    images jump: it is the mean of 1 / (1 + (loss / margin)^2), which is 1/2 for an image that is just certified and 0
    for a misclassified one.

    Args:
        model: in eval mode; images in [0,1] -> logits.
        batches: (keys, images (B, C, H, W) in [0,1], labels (B,)).
        asked: radii, method, norm, attack and nonce.
        seconds: time limit.

    Raises:
        UnsoundCertificate: an attack succeeds inside a certified radius.
    """
    end, images = time.monotonic() + seconds, 0
    asked = asked.of(model)
    prover = certifier(model, asked.method, asked.nonce, asked.norm)
    counts = {f"{name}.{eps:g}": 0.0 for eps in asked.grid for name in ("certified_acc", "certified_near", "pgd_acc")}
    for keys, images_BCHW, labels_B in (part for batch in batches for part in by_length(model, *batch)):
        analysis = prover.analyse(images_BCHW, labels_B)
        for eps in asked.grid:
            found = analysis.at(eps)
            near_B = 1 / (1 + (found.loss_B / found.margin_B).square())
            survives_B = survives(model, keys, images_BCHW, labels_B, replace(asked.attack_in_norm, eps=eps))
            confirmed(keys, found.certified_B.tolist(), survives_B, asked.method, eps)
            counts[f"certified_acc.{eps:g}"] += int(found.certified_B.sum())
            counts[f"certified_near.{eps:g}"] += float(near_B[found.correct_B].sum())
            counts[f"pgd_acc.{eps:g}"] += int((survives_B & analysis.clean.correct_B).sum())
        images += len(keys)
        if time.monotonic() > end:
            break
    return {"certified_images": float(images)} | {name: count / images for name, count in counts.items()}
