"""Training objectives by name. Each is a function (probe, images, labels) -> named terms, one of them `loss`."""

from trainers.objectives.clean import clean
from trainers.objectives.lmce import lmce
from trainers.objectives.pgd_at import pgd_at
from trainers.objectives.probe import Objective, Probe, Terms

OBJECTIVES: dict[str, Objective] = {"clean": clean, "lmce": lmce, "pgd_at": pgd_at}

__all__ = ["OBJECTIVES", "Objective", "Probe", "Terms"]
