"""The device of a process, the CPU or a GPU of its own, and the type in which a served model computes."""

from typing import Annotated

import torch

from certizoo import UserError
from certizoo.config.schema import OneOf

Device = Annotated[str, OneOf("cpu", "cuda")]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def device_of(worker: int, name: str) -> torch.device:
    """Return the device of a process, with convolutions in float32. Raises UserError if there is no such device."""
    if name == "cpu":
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    if not gpus:
        raise UserError("device=cuda: torch finds no GPU on this machine; use device=cpu")
    # By default torch rounds the factors of convolutions to 10 bits, but not those of matrix products.
    torch.backends.cudnn.allow_tf32 = False
    return torch.device("cuda", worker % gpus)
