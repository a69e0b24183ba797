"""The settings of the evaluation; invalid values are refused in one line before any work."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated

from torch import nn

from certify.evaluation.certified import Certified
from certify.methods import AUTO, named
from certify.methods.served import require_served
from certify.rows.devices import Device
from certify.rows.workers import HERE, Crew, Workers
from certify.shared.bake import Model
from certify.shared.ball import L2, NORMS
from certizoo import UserError
from certizoo.config.schema import Count, FilePath, OneOf, Section, Text, Whole


@dataclass(frozen=True, kw_only=True)
class Options(Section):
    """The settings of the evaluation but for its attacks.

    `batch_size`, `workers` and `device` change only how sums are rounded: an outcome depends on them only if it lies
    within rounding of its boundary. Outcomes of attacks that draw for many images at once (AutoAttack) belong to
    `block`.

    Attributes:
        method: the method that certifies radii; None: no certificates. norm: of these radii, 'l2' or 'linf'.
        served_dtype: 'float32': radii of the model as it is served, rounding included; None: of its float64 function.
        nonce: of the method's random starts; None: that of existing rows, or a new one.
        certificate: the folder of a finished certification of these weights and images; its radii, method and nonce are
            used; None: radii are computed.
        images: number of test images, from the first on; None: all.
        block: images that are distributed and written together; batch_size: images of a block computed at a time.
        seed: of every image's own random numbers.
        check_images: correct images used by the checks for masked gradients; 0: no checks.
        attack_dtype: type in which the attacks compute, if not that of the model ('bfloat16'); a check warns.
        on: 'here', or 'ray': the nodes of a Ray cluster.
        workers: processes, one thread each, or a GPU each with device='cuda'; None: one here, as many as fit a cluster.
    """

    method: str | None = AUTO
    norm: Annotated[str, OneOf(*NORMS)] = L2
    served_dtype: str | None = "float32"
    nonce: Text | None = None
    certificate: FilePath | None = None
    images: Count | None = 500
    batch_size: Count = 50
    block: Count = 50
    seed: Whole = 0
    check_images: Whole = 32
    attack_dtype: Annotated[str, OneOf("bfloat16")] | None = None
    on: Annotated[str, OneOf("here", "ray")] = HERE
    workers: Workers = None
    device: Device = "cpu"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.method and not self.certificate:
            require_served(self.served_dtype, self.method, "served_dtype")
        if self.served_dtype not in (None, "float32"):
            raise UserError(f"served_dtype={self.served_dtype}: attacks run on the float32 model; set float32 or null")


@dataclass(frozen=True)
class Settings(Options):
    """The settings of the evaluation.

    Attributes:
        protocol: its name.
        attacks: its entries, {name: {kind: ..., ...}}, eps in [0,1] pixel units.
    """

    protocol: str = ""
    attacks: Mapping[str, Mapping[str, object]] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.attacks:
            raise UserError(f"protocol {self.protocol} has no attacks; choose another of configs/protocol")

    @property
    def crew(self) -> Crew:
        """The processes that compute the rows."""
        return Crew(self.on, self.workers, self.device)

    def answered_by(self, certified: Certified) -> "Settings":
        """Return the settings with the certificate's method, type and nonce.

        Raises UserError if others are requested, or radii in another norm.
        """
        if not self.method:
            raise UserError("method=null and certificate= exclude each other; remove one of them")
        for key, open_value in {"method": AUTO, "nonce": None, "norm": None}.items():
            asked, there = getattr(self, key), getattr(certified, key)
            if asked not in (open_value, there):
                raise UserError(f"certificate={certified.folder} has {key}={there}, not {asked}; set {key}={there}")
        return replace(
            self, method=certified.method, nonce=certified.nonce, served_dtype=certified.said["served_dtype"]
        )

    def of(self, model: nn.Module | Model, shape_CHW: tuple[int, ...] | None = None) -> "Settings":
        """Return the settings with `auto` replaced by the method that it means for this model and these images."""
        return replace(self, method=named(self.method, model, shape_CHW)) if self.method else self
