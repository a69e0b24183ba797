"""Penalties on weights, in the form in which the engine can take them: a sum over the modules that own such weights."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import zoo
from trainers.job.job import Job
from trainers.settings import require


@dataclass(frozen=True)
class Penalty:
    """A penalty on weights: measure(owner, progress), summed over the owners of such weights."""

    owners: tuple[nn.Module, ...]
    measure: Callable[[nn.Module, float], Tensor]

    def at(self, progress: float) -> Callable[[nn.Module], Tensor]:
        """What of an owner is summed when a share `progress` of the training is done."""
        return lambda owner: self.measure(owner, progress)


def penalties_on(job: Job, model: nn.Module) -> dict[str, Penalty]:
    """MSVP and the hinge, as the job weighs them. Raises UserError where one has nothing to penalise."""
    found = {}
    if job.penalty.active:
        lambdas = vars(job.penalty)
        found["msvp"] = Penalty(
            owners_of(model, {key.removeprefix("lambda_") for key, value in lambdas.items() if value}),
            lambda owner, progress: zoo.penalty.msvp(owner, **lambdas),
        )
    if job.hinge.active:
        weight, caps, slack_at = job.hinge.weight, job.hinge.caps, job.hinge.slack_at
        found["hinge"] = Penalty(
            owners_of(model, {branch for branch, cap in caps.items() if cap is not None}),
            lambda owner, progress: weight * zoo.hinge.hinge(owner, caps, slack_at(progress)),
        )
    for name, penalty in found.items():
        require(bool(penalty.owners), f"{name}: the model has no weights of its branches; use penalty=none hinge=none")
    return found


@torch.no_grad()  # or reading a capped weight would move its power iteration on
def owners_of(model: nn.Module, branches: set[str]) -> tuple[nn.Module, ...]:
    """The modules with weights of one of these branches."""
    return tuple(module for module in model.modules() if branches & {branch for branch, _ in zoo.hinge.weights(module)})
