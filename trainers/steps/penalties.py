"""Penalties on weights in the form that the engine needs: a sum over the modules with such weights."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

import zoo
from trainers.job.job import Job
from trainers.model_parts import owners_of


@dataclass(frozen=True)
class Penalty:
    """A penalty on weights: measure(owner, progress), summed over the owners of such weights."""

    owners: tuple[nn.Module, ...]
    measure: Callable[[nn.Module, float], Tensor]

    def at(self, progress: float) -> Callable[[nn.Module], Tensor]:
        """Return the function to sum over owners when a share `progress` of the training is done."""
        return lambda owner: self.measure(owner, progress)


def penalties_on(job: Job, model: nn.Module) -> dict[str, Penalty]:
    """Return MSVP and the hinge with the job's weights."""
    found = {}
    if job.penalty.active:
        lambdas = vars(job.penalty)
        found["msvp"] = Penalty(
            owners_of(model, job.penalty.branches), lambda owner, progress: zoo.penalty.msvp(owner, **lambdas)
        )
    if job.hinge.active:
        weight, caps, slack_at = job.hinge.weight, job.hinge.caps, job.hinge.slack_at
        found["hinge"] = Penalty(
            owners_of(model, job.hinge.branches),
            lambda owner, progress: weight * zoo.hinge.hinge(owner, caps, slack_at(progress)),
        )
    return found
