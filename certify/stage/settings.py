"""What is asked of the certify stage; wrong values are refused in one line before any work."""

import math
from dataclasses import dataclass

from attacks import AttackConfig
from certify.methods import METHODS
from certify.rows.devices import DTYPES, require_device
from certify.stage.outcomes import DEFAULT_ATTACK
from certizoo import UserError
from certizoo.nearest import unknown


@dataclass(frozen=True)
class Settings:
    """What is asked of the stage. eps are L2 radii in [0,1] pixel space of the image the model takes."""

    method: str = "lofast"
    images: int | None = 500
    eps: tuple[float, ...] = (0.02, 0.05, 0.1, 36 / 255)
    headline_eps: float = 0.1
    batch_size: int = 50
    attack: AttackConfig = DEFAULT_ATTACK
    nonce: str | None = None  # of random starts; None: that of the rows that are there, or one that is drawn now
    served_dtype: str | None = None  # 'float32', 'bfloat16': of the model that is served; None: of the float64 function
    workers: int = 1  # processes that share the images; the rows are the same to rounding
    device: str = "cpu"  # or 'cuda': every process takes the next GPU

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise unknown("certification method", self.method, METHODS)
        if not self.eps or any(not 0 < eps < math.inf for eps in self.eps):
            raise UserError(f"certify.eps={list(self.eps)}: give L2 radii above 0, such as certify.eps=[0.02,0.1]")
        if len({f"{eps:g}" for eps in self.eps}) < len(self.eps):
            raise UserError(f"certify.eps={list(self.eps)}: two of them have one name to 6 digits; leave one away")
        if (self.images is not None and self.images < 1) or self.batch_size < 1:
            raise UserError("certify.images and certify.batch_size: give whole numbers above 0 (images=null: all)")
        if self.served_dtype is not None and (self.method != "adjoint" or self.served_dtype not in DTYPES):
            raise UserError(
                f"certify.served_dtype={self.served_dtype}: null, or one of {', '.join(DTYPES)} with method=adjoint"
            )
        if self.workers < 1:
            raise UserError(f"certify.workers={self.workers}: give a whole number above 0, such as that of the cores")
        require_device(self.device, "certify.device")
        if not any(f"{eps:g}" == f"{self.headline_eps:g}" for eps in self.eps):
            raise UserError(f"certify.headline_eps={self.headline_eps:g} is not among certify.eps; add it there")
