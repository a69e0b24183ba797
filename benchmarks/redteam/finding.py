"""Reports of attacks and their summary: the number of tries and the largest ratio."""

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Finding:
    """Some tries on one case.

    `case` is the module, method or inequality, `ratio` the largest of found / claimed, and `where` is what reproduces
    it.
    """

    case: str
    ratio: float
    tries: int = 1
    where: dict[str, Any] = field(default_factory=dict)

    @property
    def refutes(self) -> bool:
        """Return True if the claim is false; a ratio that is not a number refutes it too."""
        return not self.ratio <= 1


class Tally:
    """The sum of tries and the largest ratio of every (attack, case), and all findings that refute."""

    def __init__(self) -> None:
        self._best: dict[tuple[str, str], Finding] = {}
        self.refuted: list[dict[str, Any]] = []

    def add(self, attack: str, finding: Finding) -> None:
        best = self._best.get((attack, finding.case), Finding(finding.case, 0.0, 0))
        larger = finding if finding.ratio > best.ratio or finding.refutes else best
        tries = best.tries + finding.tries
        self._best[attack, finding.case] = Finding(finding.case, larger.ratio, tries, larger.where)
        if finding.refutes:
            self.refuted.append({"attack": attack} | asdict(finding))

    def rows(self) -> list[dict[str, Any]]:
        return [{"attack": attack} | asdict(self._best[attack, case]) for attack, case in sorted(self._best)]
