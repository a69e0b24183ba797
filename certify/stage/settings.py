"""The settings of the certify stage; invalid values are refused in one line before any work."""

import math
from dataclasses import dataclass, replace

from torch import nn

from certify.methods import AUTO, NAMES, named
from certify.methods.served import require_served
from certify.rows.devices import require_device
from certify.rows.workers import HERE, PLACES, Crew
from certify.shared.ball import L2, LINF, known
from certify.stage.outcomes import DEFAULT_ATTACK
from certizoo import UserError
from certizoo.attacks import AttackConfig
from certizoo.inputs import require_radius
from certizoo.nearest import unknown

# norm -> the default radii, and the one by which versions are compared
EPS = {L2: (0.02, 0.05, 0.1, 36 / 255), LINF: (1 / 255, 2 / 255, 4 / 255, 8 / 255)}
HEADLINE = {L2: 0.1, LINF: 1 / 255}


@dataclass(frozen=True)
class Settings:
    """The settings of the stage.

    `eps` and `headline_eps` are radii in `norm`, in [0,1] pixel space of the model's input; None means those of EPS and
    HEADLINE. They replace the attack's own norm and eps.
    """

    method: str = AUTO  # or another of NAMES
    norm: str = L2
    images: int | None = 500
    eps: tuple[float, ...] | None = None
    headline_eps: float | None = None
    batch_size: int = 50
    attack: AttackConfig = DEFAULT_ATTACK
    nonce: str | None = None  # of random starts; None: that of existing rows, or a new one
    beacon: str | None = None  # text published after weights and images; the nonce is derived from all three
    served_dtype: str | None = "float32"  # or 'bfloat16': the model as it is served; None: its float64 function
    on: str = HERE  # or 'ray': actors of a Ray cluster share the images; the rows are the same to rounding
    workers: int | None = None  # processes that share the images; None: one here, or as many as fit the cluster
    device: str = "cpu"  # or 'cuda': every process takes the next GPU

    def __post_init__(self) -> None:
        if self.method not in NAMES:
            raise unknown("certification method", self.method, NAMES)
        known(self.norm)
        if not self.grid or any(not 0 < eps < math.inf for eps in self.grid):
            raise UserError(f"certify.eps={list(self.grid)} must be radii above 0, such as certify.eps=[0.02,0.1]")
        require_radius("certify.eps", max(self.grid), self.norm)
        if len({f"{eps:g}" for eps in self.grid}) < len(self.grid):
            raise UserError(f"certify.eps={list(self.grid)}: two radii are equal to six digits; remove one")
        if (self.images is not None and self.images < 1) or self.batch_size < 1:
            raise UserError("certify.images and certify.batch_size must be whole numbers above 0 (images=null: all)")
        require_served(self.served_dtype, self.method, "certify.served_dtype")
        if self.workers is not None and self.workers < 1:
            raise UserError(f"certify.workers={self.workers} must be a whole number above 0, such as the core count")
        if self.on not in PLACES:
            raise UserError(f"certify.on={self.on}: choose one of {', '.join(PLACES)}")
        require_device(self.device, "certify.device")
        if not any(f"{eps:g}" == f"{self.headline:g}" for eps in self.grid):
            raise UserError(f"certify.headline_eps={self.headline:g} is not among certify.eps; add it there")

    @property
    def crew(self) -> Crew:
        """The processes that compute the rows."""
        return Crew(self.on, self.workers, self.device)

    def of(self, model: nn.Module) -> "Settings":
        """Return the settings with `auto` replaced by the method that it means for this model."""
        return replace(self, method=named(self.method, model))

    @property
    def grid(self) -> tuple[float, ...]:
        """The radii that are certified."""
        return EPS[self.norm] if self.eps is None else self.eps

    @property
    def headline(self) -> float:
        """The radius by which versions are compared."""
        return HEADLINE[self.norm] if self.headline_eps is None else self.headline_eps

    @property
    def attack_in_norm(self) -> AttackConfig:
        """The attack at each eps of the grid, in the norm of the certificate."""
        return replace(self.attack, norm=self.norm)
