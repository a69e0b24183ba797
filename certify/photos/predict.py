"""The answer for one photograph: the class, its margin, the proved radius, and the nearest attack that was found."""

from dataclasses import dataclass
from math import floor
from pathlib import Path
from typing import Annotated

import torch
from torch import Tensor

import zoo
from certify.api import certifier, radius_of
from certify.evaluation.refuted import Found, refuse
from certify.methods import named
from certify.photos.closest_attack import closest_attack
from certify.photos.names import names_of
from certify.photos.photo import Photo
from certify.rows.devices import Device, device_of
from certify.rows.draws import draws
from certify.rows.intervals import NAMES, radius_in
from certify.shared.bake import logit_differences
from certify.shared.ball import known
from certify.shared.certificate import Certifier
from certizoo import UserError
from certizoo.attacks import AttackConfig
from certizoo.attacks.norms import distance
from certizoo.config.schema import Ge, Le, Section, Text
from zoo.bounds import lanczos

HALF = {"l2": 0.5e-4, "linf": 0.5e-3 / 255}  # half of a radius's last printed digit, subtracted to round down


@dataclass(frozen=True)
class Asked(Section):
    """The settings for certifying and attacking photographs: configs/image.yaml."""

    method: str = "auto"
    norm: str = "l2"
    nonce: Text | None = None
    steps: Annotated[int, Ge(1), Le(10_000)] = 40
    device: Device = "cpu"

    def __post_init__(self) -> None:
        super().__post_init__()
        known(self.norm)


@dataclass(frozen=True)
class Answer:
    """The answer for one photograph.

    `attacked_CHW` is the nearest image of another class that was found, at `distance`.
    """

    photo: Photo
    label: int
    name: str
    margin: float
    radius: float
    norm: str
    method: str
    failure: float  # probability that the radius is wrong
    attacked_CHW: Tensor | None
    attacked_name: str
    distance: float | None

    @property
    def proved(self) -> str:
        """The radius in words, rounded down."""
        return radius_in(self.norm, max(0.0, self.radius - HALF[self.norm])) if self.radius > 0 else "nothing"

    @property
    def found(self) -> str:
        """The distance in words."""
        return "none" if self.distance is None else radius_in(self.norm, self.distance)

    def words(self) -> str:
        """Return the answer in two or three sentences."""
        norm, size = NAMES[self.norm], "x".join(str(side) for side in reversed(self.photo.image_CHW.shape[1:]))
        proved = (
            f"Proved ({self.method}): no change of {norm} size up to {self.proved} changes the class."
            if self.radius > 0
            else "Nothing is proved around it."
        )
        found = (
            "No attack was found."
            if self.distance is None
            else f"The nearest attack found makes it {self.attacked_name} at {self.found}."
        )
        said = f"{self.photo.name}: {self.name} ({self.label}), margin {self.margin:.3g}."
        return f"{said} {proved} {found} {self._of(size)}"

    def _of(self, size: str) -> str:
        """Return a sentence about the image that the radius applies to."""
        if not self.photo.resized:
            return f"Radii are of the {size} image in [0,1] pixels."
        there = f"{self.photo.width}x{self.photo.height}"
        return f"Radii are of the {size} image that the {there} photograph was resized to, in [0,1] pixels."

    @property
    def scale(self) -> str:
        """The size of the radius in words, rounded down: a change of one value, and of all."""
        values, steps = self.photo.image_CHW.numel(), 255 * self.radius
        every = floor(100 * steps / (1 if self.norm == "linf" else values**0.5)) / 100
        if self.norm == "linf":
            return f"Every one of the {values} values may move by {every:.2f} of 255."
        return f"One of the {values} values may move by {floor(steps)} of 255, or all of them by {every:.2f}."

    def row(self) -> dict[str, object]:
        """Return the answer as a row for CSV."""
        return {
            "file": self.photo.name,
            "class": self.label,
            "name": self.name,
            "margin": self.margin,
            "radius": self.radius,
            "norm": self.norm,
            "method": self.method,
            "failure": self.failure,
            "attack_distance": self.distance,
            "attack_name": self.attacked_name,
            "width": self.photo.width,
            "height": self.photo.height,
            "radius_is_of": f"{self.photo.image_CHW.shape[2]}x{self.photo.image_CHW.shape[1]}",
        }


class Predictor:
    """A hand-over that answers photographs; the certifier of a norm is made on first use."""

    def __init__(self, handover: Path, asked: Asked, refuted: Path) -> None:
        self.asked, self.refuted = asked, refuted
        self.device = device_of(0, asked.device)
        self.model, config = zoo.handover.load(handover)
        self.model.to(self.device)
        options = config["model"]
        if "vocabulary" in options:
            raise UserError(f"{options['name']} is a model of sentences, not of photographs; run python -m certify")
        self.channels, self.size = options["in_chans"], options["img_size"]
        self.title = f"{options['name']} ({(config.get('data') or {}).get('name', 'unknown data')})"
        self.names = names_of((config.get("data") or {}).get("name", ""), options["num_classes"])
        self.method = named(asked.method, self.model)
        self._certifiers: dict[str, Certifier] = {}
        self._nonce = asked.nonce or lanczos.new_nonce()
        self.certifier_of(asked.norm)  # refuses a model that cannot be certified before any photograph

    def certifier_of(self, norm: str) -> Certifier:
        if norm not in self._certifiers:
            self._certifiers[norm] = certifier(self.model, self.method, self._nonce, norm)
        return self._certifiers[norm]

    def __call__(self, photo: Photo, norm: str | None = None) -> Answer:
        """Answer a photograph. Raises UnsoundCertificate, with both images kept, if the attack is within the radius."""
        norm = known(norm or self.asked.norm)
        prover, image_CHW = self.certifier_of(norm), photo.image_CHW.to(self.device)
        logit_differences(self.model, prover.baked, image_CHW[None])
        with torch.no_grad():
            label = int(self.model(image_CHW[None]).argmax(-1))
        analysis = prover.analyse(image_CHW[None], torch.tensor([label], device=self.device))
        radius = float(radius_of(analysis))
        attack = AttackConfig(norm=norm, steps=self.asked.steps, loss="margin", stop_when_fooled=True)
        attacked_CHW = closest_attack(self.model, image_CHW, label, radius, attack, lambda: draws([photo.name])[0])
        away, other = None, ""
        if attacked_CHW is not None:
            away = float(distance(attacked_CHW[None].double(), image_CHW[None].double(), norm))
            with torch.no_grad():
                other = self.names[int(self.model(attacked_CHW[None]).argmax(-1))]
            if away <= radius:
                refuse(Found(photo.name, image_CHW, attacked_CHW, label, "PGD", norm, away, radius), self.refuted)
        return Answer(
            photo=photo,
            label=label,
            name=self.names[label],
            margin=float(analysis.clean.margin_BJ.amin(-1)),
            radius=radius,
            norm=norm,
            method=self.method,
            failure=analysis.failure,
            attacked_CHW=None if attacked_CHW is None else attacked_CHW.cpu(),
            attacked_name=other,
            distance=away,
        )
