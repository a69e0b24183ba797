"""One process of the certify stage: a model, its certifier and a device; a batch in, its rows out."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

import zoo
from certify.api import certifier
from certify.bake import LOGIT_TOLERANCE, logit_differences
from certify.certificate import Certifier
from certify.evaluate import rows_of
from certify.records import Row
from certify.served_adjoint import ServedAdjoint
from certify.workers import Batch
from certizoo import UserError

if TYPE_CHECKING:
    from certify.stage import Settings

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
COARSE = 0.25  # LOGIT_TOLERANCE of bfloat16, whose rounding is part of the certificate


class InType(nn.Module):
    """A model of another type between float32 images and float32 logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.dtype = model, next(model.parameters()).dtype

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return self.model(x_BCHW.to(self.dtype)).float()


def device_of(worker: int, name: str) -> torch.device:
    """The device of a process; convolutions there keep float32. Raises UserError where there is none of that name."""
    if name == "cpu":
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    if not gpus:
        raise UserError("device=cuda: torch finds no GPU on this machine; use device=cpu")
    torch.backends.cudnn.allow_tf32 = (
        False  # torch's default rounds what they multiply to 10 bits; matrix products it leaves
    )
    return torch.device("cuda", worker % gpus)


class Prover:
    """A hand-over and its certifier, on one device: a batch in, its rows out."""

    def __init__(self, handover: Path, settings: "Settings", worker: int = 0) -> None:
        self.device = device_of(worker, settings.device)
        self.model, self.config = zoo.handover.load(handover)
        self.model.to(self.device)
        self.settings = settings
        self.certifier: Certifier
        if settings.served_dtype is None:
            self.certifier = certifier(self.model, settings.method)
        else:
            dtype = DTYPES[settings.served_dtype]
            self.certifier, self.model = ServedAdjoint(self.model, dtype), InType(self.model.to(dtype))

    def __call__(self, batch: Batch) -> list[Row]:
        """The rows of `certify.evaluate`, and how far the served logits of each image are from the certified ones."""
        keys, images, labels = batch[0], batch[1].to(self.device), batch[2].to(self.device)
        tolerance = COARSE if self.settings.served_dtype == "bfloat16" else LOGIT_TOLERANCE
        differences = logit_differences(self.model, self.certifier.baked, images, tolerance).tolist()
        rows = rows_of(
            self.certifier,
            self.model,
            keys,
            images,
            labels,
            method=self.settings.method,
            eps_grid=self.settings.eps,
            attack=self.settings.attack,
            explain_at=self.settings.headline_eps,
        )
        return [{**row, "served_difference": difference} for row, difference in zip(rows, differences, strict=True)]
