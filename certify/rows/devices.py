"""Where a process computes, the CPU or a GPU of its own, and in which type a served model computes."""

import torch
from torch import Tensor, nn

from certizoo import UserError

DEVICES = ("cpu", "cuda")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def require_device(name: str, key: str) -> None:
    """Raise UserError, naming the key of the configuration, where `name` is none of DEVICES."""
    if name not in DEVICES:
        raise UserError(f"{key}={name}: choose one of {', '.join(DEVICES)}")


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
    # torch's default rounds the factors of convolutions to 10 bits; those of matrix products it leaves alone.
    torch.backends.cudnn.allow_tf32 = False
    return torch.device("cuda", worker % gpus)
