"""A VNN-LIB property in its simple form: on a box of inputs no class reaches the label.

    lower_i <= X_i <= upper_i  for every input,        or_j (Y_j >= Y_label)  for every other class: never

Anything else is refused.
"""

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from certizoo import UserError

_NUMBER = r"-?\d{1,40}(?:\.\d{1,40})?(?:[eE][-+]?\d{1,3})?"
_SAID = re.compile(
    r"\(declare-const (?P<kind>[XY])_(?P<index>\d{1,6}) Real\)"
    rf"|\(assert \((?P<side><=|>=) X_(?P<input>\d{{1,6}}) (?P<bound>{_NUMBER})\)\)"
    r"|\(assert \(or(?P<rivals>(?: ?\(and \(>= Y_\d{1,6} Y_\d{1,6}\)\))+) ?\)\)",
    re.ASCII,
)
_RIVAL = re.compile(r"Y_(\d+) Y_(\d+)", re.ASCII)


@dataclass(frozen=True)
class Property:
    """The property that `label` is the class on the whole box. lower_I, upper_I: as written, in float64."""

    lower_I: NDArray[np.float64]
    upper_I: NDArray[np.float64]
    label: int


def parse(content: bytes, name: str) -> Property:
    """Parse the property of a file's content; `name` is its origin in messages. Raises UserError for another form."""
    declared: dict[str, set[int]] = {"X": set(), "Y": set()}
    bounds: dict[str, dict[int, float]] = {"<=": {}, ">=": {}}
    rivals: list[tuple[int, int]] = []
    for said in _statements(content, name):
        if said["kind"]:
            _once(int(said["index"]) not in declared[said["kind"]], said[0], name)
            declared[said["kind"]].add(int(said["index"]))
        elif said["side"]:
            _once(int(said["input"]) not in bounds[said["side"]], said[0], name)
            bounds[said["side"]][int(said["input"])] = float(said["bound"])
        else:
            _once(not rivals, said[0], name)
            rivals = [(int(other), int(label)) for other, label in _RIVAL.findall(said["rivals"])]
    inputs, classes = range(len(declared["X"])), range(len(declared["Y"]))
    if not (inputs and {*inputs} == declared["X"] == bounds["<="].keys() == bounds[">="].keys()):
        raise UserError(f"{name} does not bound every input X_0, X_1, ... from below and above; give a box")
    label = rivals[0][1] if rivals else -1
    if {*classes} != declared["Y"] or sorted(rivals) != [(other, label) for other in classes if other != label]:
        raise UserError(f"{name} does not compare one class with every other one; give the property of one label")
    lower_I, upper_I = (np.array([bounds[side][i] for i in inputs]) for side in (">=", "<="))
    if label not in classes or not (np.isfinite(lower_I).all() and np.isfinite(upper_I).all()):
        raise UserError(f"{name} has an invalid label or bound; give classes of the net, and finite numbers")
    if bool((lower_I > upper_I).any()):
        raise UserError(f"{name} has an empty box; give lower bounds that are below the upper ones")
    return Property(lower_I, upper_I, label)


def _statements(content: bytes, name: str) -> list[re.Match[str]]:
    """Return the statements without comments."""
    lines = content.decode("ascii", "replace").splitlines()
    text = " ".join(" ".join(line.partition(";")[0] for line in lines).split())
    found, at = [], 0
    while at < len(text):
        said = _SAID.match(text, at)
        if said is None:
            raise UserError(f"{name} says {text[at : at + 60]!r}; only boxes and one label are read")
        found.append(said)
        at = said.end() + text.startswith(" ", said.end())
    return found


def _once(first: bool, said: str, name: str) -> None:
    if not first:
        raise UserError(f"{name} says {said[:60]!r} twice; keep one")
