"""Search spaces: `configs/space/NAME.yaml`, keys of the trainer's configuration with a distribution each.

    trainer: adv_train                                     # trainers/NAME.py; the default
    overrides: [penalty=msvp]                              # what every trial of this space needs
    without_model: [+model=spec_vit_digits, data=digits]   # used if the command names no model
    parameters:
      penalty.lambda_q: {log_uniform: [1.0e-6, 1.0e-2], zero: 0.1}
      model.num_heads: {choice: [1, 2, 4]}

A point of a space maps every key to a raw number; `values` converts it to the trainer's value.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Annotated, Any

from certizoo import UserError
from certizoo.config.compose import CONFIGS, files_of
from certizoo.config.schema import Ge, Lt, MinLen, OneOf, Positive, Section, section_of
from certizoo.documents import read_yaml
from certizoo.nearest import unknown

KINDS = ("log_uniform", "uniform", "integer", "choice")
Point = dict[str, Any]


@dataclass(frozen=True)
class Parameter:
    """One distribution: `log_uniform` and `uniform` on [low, high], `integer` on low..high, `choice` among options.

    zero: the share of draws that mean 0 (log_uniform only). The range is extended below `low` by that share, and every
    value there is 0. So 0 is next to the small weights for a searcher that models the logarithm.
    """

    kind: str
    low: float = 0.0
    high: float = 0.0
    options: tuple[Any, ...] = ()
    zero: float = 0.0

    @property
    def raw_low(self) -> float:
        """Return low * (low / high)^(zero / (1 - zero)): the share `zero` of the logarithmic range lies below `low`."""
        return self.low * (self.low / self.high) ** (self.zero / (1 - self.zero)) if self.zero else self.low

    def draw(self, random: Random) -> Any:
        """Draw a raw value."""
        match self.kind:
            case "log_uniform":
                return math.exp(random.uniform(math.log(self.raw_low), math.log(self.high)))
            case "uniform":
                return random.uniform(self.low, self.high)
            case "integer":
                return random.randint(int(self.low), int(self.high))
            case _:
                return random.choice(self.options)

    def value(self, raw: Any) -> Any:
        """Return the trainer's value: 0 below `low`; four significant digits, so that a tag states it exactly."""
        if self.kind == "choice":
            return raw
        if self.kind == "integer":
            return int(min(max(raw, self.low), self.high))
        if self.zero and raw < self.low:
            return 0.0
        return float(f"{min(max(raw, self.low), self.high):.4g}")


@dataclass(frozen=True)
class Space:
    """The varying keys (`parameters`), and the fixed part of the command line."""

    name: str
    trainer: str
    overrides: tuple[str, ...]
    without_model: tuple[str, ...]
    parameters: Mapping[str, Parameter]

    def draw(self, random: Random) -> Point:
        return {key: parameter.draw(random) for key, parameter in self.parameters.items()}

    def values(self, point: Point) -> dict[str, Any]:
        """Return the keys of the trainer's configuration, in the file's order."""
        return {key: parameter.value(point[key]) for key, parameter in self.parameters.items()}


def names(configs: Path = CONFIGS) -> list[str]:
    return sorted(files_of("space", configs))


def load(name: str, configs: Path = CONFIGS) -> Space:
    """Load the space `name`. Raises UserError if it does not exist or its file is not a space."""
    return of(name, read(name, configs), str(configs / "space" / f"{name}.yaml"))


def read(name: str, configs: Path = CONFIGS) -> dict[str, Any]:
    """Return the content of the file of the space `name`. Raises UserError if it does not exist."""
    if (path := files_of("space", configs).get(name)) is None:
        raise unknown("space", name, names(configs), "configs/space")
    content = read_yaml(path)
    if not isinstance(content, dict):
        raise UserError(f"{path} is not a space; give it the keys overrides and parameters, as in configs/space")
    return content


def of(name: str, content: Mapping[str, Any], where: str) -> Space:
    """Return the space of this content, found in `where`. Raises UserError if it is not a space."""
    try:
        said = section_of(_File, content)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    if not said.parameters:
        raise UserError(f"{where}: parameters is empty; give a key with a distribution, such as optimizer.lr")
    parameters = {key: _parameter(f"{where}: {key}", facts) for key, facts in said.parameters.items()}
    return Space(name, said.trainer, said.overrides, said.without_model, parameters)


@dataclass(frozen=True)
class _File(Section):
    """A space as its file has it."""

    parameters: dict[str, Any]
    overrides: tuple[str, ...] = ()
    without_model: tuple[str, ...] = ()
    trainer: Annotated[str, OneOf("adv_train", "std_train", "constrain")] = "adv_train"


@dataclass(frozen=True)
class _Distribution(Section):
    """A parameter as its file has it: exactly one of KINDS."""

    log_uniform: tuple[Positive, Positive] | None = None
    uniform: tuple[float, float] | None = None
    integer: tuple[int, int] | None = None
    choice: Annotated[tuple[Any, ...], MinLen(1)] | None = None
    zero: Annotated[float, Ge(0), Lt(1)] = 0.0


def _parameter(where: str, said: object) -> Parameter:
    try:
        given = section_of(_Distribution, said)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    kinds = [kind for kind in KINDS if getattr(given, kind) is not None]
    if len(kinds) != 1 or (given.zero and kinds != ["log_uniform"]):
        raise UserError(f"{where}: give one of {', '.join(KINDS)}, and with log_uniform optionally zero")
    if given.choice is not None:
        return Parameter("choice", options=given.choice)
    low, high = getattr(given, kinds[0])
    if low >= high:
        raise UserError(f"{where}: {kinds[0]}=[{low}, {high}] is invalid; give [low, high] with low < high")
    return Parameter(kinds[0], float(low), float(high), zero=given.zero)
