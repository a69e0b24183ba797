"""The inputs of a model's head for clean and for attacked images (SpecFormer, section 6.3).

    z(x): the features,      logits = head(z(x)),      x' = attack(x)

Letters: B images of a batch, N all images, D width of the features, K classes.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from certify.rows.workers import Batch
from certizoo import UserError
from certizoo.attacks import AttackConfig


class Features(NamedTuple):
    """The features z of the same images, clean and attacked, and which images are classified correctly."""

    clean_ND: Tensor
    attacked_ND: Tensor
    clean_correct_N: Tensor
    attacked_correct_N: Tensor


@torch.no_grad()
def read_by_head(model: Any, images_BCHW: Tensor) -> tuple[Tensor, Tensor]:
    """Return z (B, D), the input of the last linear layer of any model of the zoo, and the model's logits (B, K)."""
    tokens = model.forward_features(images_BCHW)
    return model.forward_head(tokens, pre_logits=True), model.forward_head(tokens)


def clean_and_attacked(
    model: nn.Module, batches: Iterable[Batch], attack: AttackConfig, seed: int, progress: Callable[[], None]
) -> Features:
    """Attack the batches in order on the model's device, with one generator for all; return the results on the CPU.

    Raises UserError if features are not finite.
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for _, images_BCHW, labels_B in batches:
        images_BCHW, labels_B = images_BCHW.to(device), labels_B.to(device)
        z_BD, logits_BK = read_by_head(model, images_BCHW)
        attacked_z_BD, attacked_logits_BK = read_by_head(model, attack.run(model, images_BCHW, labels_B, generator))
        correct, survives = (logits.argmax(-1) == labels_B for logits in (logits_BK, attacked_logits_BK))
        parts.append((z_BD, attacked_z_BD, correct, survives))
        progress()
    found = Features(*(torch.cat(part).cpu() for part in zip(*parts, strict=True)))
    if not bool(torch.isfinite(found.clean_ND).all() and torch.isfinite(found.attacked_ND).all()):
        raise UserError("the model's features hold NaN or infinite values; use an earlier checkpoint or train again")
    return found
