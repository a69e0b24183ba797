"""The settings of the certify stage; invalid values are refused in one line before any work."""

from dataclasses import dataclass, replace
from typing import Annotated

from torch import nn

from certify.methods import AUTO, NAMES, named
from certify.methods.served import require_served
from certify.rows.devices import Device
from certify.rows.workers import HERE, Crew, Workers
from certify.shared.bake import Model
from certify.shared.ball import L2, LINF, NORMS
from certify.stage.outcomes import DEFAULT_ATTACK
from certizoo import UserError
from certizoo.attacks import AttackConfig
from certizoo.config.schema import Count, OneOf, Positive, Section, Text
from certizoo.inputs import require_radius
from certizoo.nearest import unknown

# norm -> the default radii, and the one by which versions are compared
EPS = {L2: (0.02, 0.05, 0.1, 36 / 255), LINF: (1 / 255, 2 / 255, 4 / 255, 8 / 255)}
HEADLINE = {L2: 0.1, LINF: 1 / 255}


@dataclass(frozen=True)
class Settings(Section):
    """The settings of the stage.

    `eps` and `headline_eps` are radii in `norm`, in [0,1] pixel space of the model's input; None means those of EPS and
    HEADLINE. They replace the attack's own norm and eps.
    """

    method: str = AUTO  # or another of NAMES
    norm: Annotated[str, OneOf(*NORMS)] = L2
    images: Count | None = 500
    eps: tuple[Positive, ...] | None = None
    headline_eps: Positive | None = None
    search_radii: bool = True  # False: an image's radius is the largest certified one of `eps`
    batch_size: Count = 10
    attack: AttackConfig = DEFAULT_ATTACK
    nonce: Text | None = None  # of random starts; None: that of existing rows, or a new one
    beacon: Text | None = None  # text published after weights and images; the nonce is derived from all three
    served_dtype: str | None = "float32"  # or 'bfloat16': the model as it is served; None: its float64 function
    on: Annotated[str, OneOf("here", "ray")] = HERE  # ray: tasks of a cluster; the rows are the same to rounding
    workers: Workers = None  # processes that share the images; None: one here, or as many as fit the cluster
    device: Device = "cpu"  # cuda: every process takes the next GPU

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.method not in NAMES:
            raise unknown("certification method", self.method, NAMES)
        if not self.grid:
            raise UserError("certify.eps=[] has no radius; give some, such as certify.eps=[0.02,0.1]")
        require_radius("certify.eps", max(self.grid), self.norm)
        if len({f"{eps:g}" for eps in self.grid}) < len(self.grid):
            raise UserError(f"certify.eps={list(self.grid)}: two radii are equal to six digits; remove one")
        require_served(self.served_dtype, self.method, "certify.served_dtype")
        if self.headline not in self.grid:
            raise UserError(f"certify.headline_eps={self.headline:g} is not among certify.eps; add it there")

    @property
    def crew(self) -> Crew:
        """The processes that compute the rows."""
        return Crew(self.on, self.workers, self.device)

    def of(self, model: nn.Module | Model, shape_CHW: tuple[int, ...] | None = None) -> "Settings":
        """Return the settings with `auto` replaced by the method that it means for this model and these images."""
        return replace(self, method=named(self.method, model, shape_CHW))

    @property
    def grid(self) -> tuple[float, ...]:
        """The radii that are certified."""
        return EPS[self.norm] if self.eps is None else self.eps

    @property
    def headline(self) -> float:
        """The radius by which versions are compared: the one of the grid that equals it to six digits."""
        given = HEADLINE[self.norm] if self.headline_eps is None else self.headline_eps
        return next((eps for eps in self.grid if f"{eps:g}" == f"{given:g}"), given)

    @property
    def attack_in_norm(self) -> AttackConfig:
        """The attack at each eps of the grid, in the norm of the certificate."""
        return replace(self.attack, norm=self.norm)
