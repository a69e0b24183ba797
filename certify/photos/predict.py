"""The answer for one photograph: the class, its margin, the proved radius, and the nearest attack that was found."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import floor
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

import zoo
from certify.api import captured, radius_of
from certify.evaluation.refuted import Found, refuse
from certify.methods import named
from certify.methods.served import certifier_of, require_served
from certify.photos.closest_attack import closest_attack
from certify.photos.names import names_of
from certify.photos.photo import Photo
from certify.rows.devices import Device, device_of
from certify.rows.draws import draws
from certify.rows.intervals import radius_in
from certify.shared.bake import logit_differences
from certify.shared.ball import NORMS, known
from certify.shared.certificate import Certifier
from certizoo import UserError
from certizoo.attacks import AttackConfig
from certizoo.attacks.norms import distance
from certizoo.config.schema import Ge, Le, OneOf, Section, Text
from certizoo.norms import NAMES
from zoo.bounds import lanczos
from zoo.bounds.rule_table import NoRule

HALF = {"l2": 0.5e-4, "linf": 0.5e-3 / 255}  # half of a radius's last printed digit, subtracted to round down
QUICK, SLOW = "adjoint", ("image", "taylor", "best")  # the method that answers before a slow one does


@dataclass(frozen=True)
class Asked(Section):
    """The settings for certifying and attacking photographs: configs/image.yaml."""

    method: str = "auto"
    norm: Annotated[str, OneOf(*NORMS)] = "l2"
    nonce: Text | None = None
    served_dtype: Annotated[str, OneOf("float32")] | None = "float32"
    steps: Annotated[int, Ge(1), Le(10_000)] = 40
    device: Device = "cpu"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_served(self.served_dtype, self.method, "served_dtype")


class Attacked(NamedTuple):
    """The nearest image of another class that was found, its class and its distance; None, "" and None without one."""

    image_CHW: Tensor | None
    name: str
    distance: float | None


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
    served_dtype: str | None  # None: the radius is of the float64 function
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
        of = f"as served in {self.served_dtype}" if self.served_dtype else "exact arithmetic"
        proved = (
            f"Proved ({self.method}, {of}): no change of {norm} size up to {self.proved} changes the class."
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
            "served_dtype": self.served_dtype,
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
        shape_CHW = zoo.input_size(options)
        self.channels, self.size, _ = shape_CHW
        self.title = f"{options['name']} ({(config.get('data') or {}).get('name', 'unknown data')})"
        self.names = names_of((config.get("data") or {}).get("name", ""), options["num_classes"])
        self.given = captured(self.model, shape_CHW)
        self.method = named(asked.method, self.given, shape_CHW)
        self._certifiers: dict[str, Mapping[str, Certifier]] = {}
        self._nonce = asked.nonce or lanczos.new_nonce()
        self.certifiers_of(asked.norm)  # refuses a model that cannot be certified before any photograph

    def certifiers_of(self, norm: str) -> Mapping[str, Certifier]:
        """Return the certifiers by method: that of `asked`, after a quick one if it is slow."""
        if norm not in self._certifiers:
            given = self.asked.served_dtype, self._nonce, norm
            found = {self.method: certifier_of(self.given, self.method, *given)}
            if self.method in SLOW:
                with suppress(NoRule):  # no second order, as `best` does not need
                    found = {QUICK: certifier_of(self.given, QUICK, *given)} | found
            self._certifiers[norm] = found
        return self._certifiers[norm]

    def __call__(self, photo: Photo, norm: str | None = None) -> Answer:
        """Return the answer of the method that is asked for."""
        return next(self._answers(photo, known(norm or self.asked.norm), [self.method]))

    def answers(self, photo: Photo, norm: str | None = None) -> Iterator[Answer]:
        """Answer a photograph, before a slow method also by a quick one; the attack is the same."""
        ball = known(norm or self.asked.norm)
        yield from self._answers(photo, ball, self.certifiers_of(ball))

    def _answers(self, photo: Photo, norm: str, methods: Iterable[str]) -> Iterator[Answer]:
        """Answer by these methods.

        Raises UnsoundCertificate, with both images kept, if the attack is within a radius.
        """
        image_CHW, attacked = photo.image_CHW.to(self.device), None
        with torch.no_grad():
            label = int(self.model(image_CHW[None]).argmax(-1))
        for method in methods:
            prover = self.certifiers_of(norm)[method]
            logit_differences(self.model, prover.baked, image_CHW[None])
            analysis = prover.analyse(image_CHW[None], torch.tensor([label], device=self.device))
            radius = float(radius_of(analysis))
            attacked = attacked or self._attacked(photo.name, image_CHW, label, radius, norm)
            if attacked.image_CHW is not None and attacked.distance is not None and attacked.distance <= radius:
                both = image_CHW, attacked.image_CHW
                refuse(Found(photo.name, *both, label, "PGD", norm, attacked.distance, radius), self.refuted)
            yield Answer(
                photo=photo,
                label=label,
                name=self.names[label],
                margin=float(analysis.clean.margin_BJ.amin(-1)),
                radius=radius,
                norm=norm,
                method=method,
                served_dtype=self.asked.served_dtype,
                failure=analysis.failure,
                attacked_CHW=None if attacked.image_CHW is None else attacked.image_CHW.cpu(),
                attacked_name=attacked.name,
                distance=attacked.distance,
            )

    def _attacked(self, name: str, image_CHW: Tensor, label: int, radius: float, norm: str) -> Attacked:
        attack = AttackConfig(norm=norm, steps=self.asked.steps, loss="margin", stop_when_fooled=True)
        found_CHW = closest_attack(self.model, image_CHW, label, radius, attack, lambda: draws([name])[0])
        if found_CHW is None:
            return Attacked(None, "", None)
        with torch.no_grad():
            other = self.names[int(self.model(found_CHW[None]).argmax(-1))]
        return Attacked(found_CHW, other, float(distance(found_CHW[None].double(), image_CHW[None].double(), norm)))
