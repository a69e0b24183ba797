"""Training objectives by name. Each is a function (probe, images, labels) -> named terms, one of them `loss`."""

from trainers.objectives.clean import clean
from trainers.objectives.curvature import curvature
from trainers.objectives.emma import emma
from trainers.objectives.gloro import gloro
from trainers.objectives.lmce import lmce
from trainers.objectives.lmt import lmt
from trainers.objectives.local_lip import local_lip
from trainers.objectives.logit_annealing import logit_annealing
from trainers.objectives.mart import mart
from trainers.objectives.pgd_at import pgd_at
from trainers.objectives.probe import Objective, Probe, Terms
from trainers.objectives.trades import trades

OBJECTIVES: dict[str, Objective] = {
    "clean": clean,
    "curvature": curvature,
    "emma": emma,
    "gloro": gloro,
    "lmce": lmce,
    "lmt": lmt,
    "local_lip": local_lip,
    "logit_annealing": logit_annealing,
    "mart": mart,
    "pgd_at": pgd_at,
    "trades": trades,
}
SOFT_LABELS = ("clean", "pgd_at", "trades")  # labels may be probabilities
LIPSCHITZ = ("gloro", "lmt", "local_lip")  # the model must have a Lipschitz constant to train for
SECOND_ORDER = ("curvature", "emma", "lmce")  # the loss contains an input gradient, taken inside the forward pass
OF_TEXT = ("clean", "logit_annealing", "pgd_at", *SECOND_ORDER)  # one pass over each sentence, so padding stays apart

__all__ = ["LIPSCHITZ", "OBJECTIVES", "OF_TEXT", "SECOND_ORDER", "SOFT_LABELS", "Objective", "Probe", "Terms"]
