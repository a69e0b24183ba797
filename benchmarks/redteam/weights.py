"""Ascent on the weights of a small model and on its image for drop / claimed loss.

At a fixed radius, the certified one or a larger one, for which slabs may still lower the claimed loss, ascent finds the
point x' of the ball where a margin is smallest, and

    drop(w, x) = m(x) - m(x')          its gradient shows how weights and image can lower the margin further;

a step along it, with noise, is kept if drop / claimed loss has grown, and halved otherwise: the claim itself has no
gradient.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, product
from typing import Any

import torch
from torch import Tensor

from benchmarks.redteam.claims import METHODS, Claim, analysis_of, claim_at, drop, margin
from benchmarks.redteam.finding import Finding
from certify.api import radius_of
from certify.shared.bake import bake
from certify.shared.ball import NORMS
from tests.tools.trials import KINDS, SIZES, Subject

CLIMB = 12  # steps
FIRST_STEP = 0.1  # relative to the weights
DESCENT = 12  # steps to a point where a margin is low
CASES = tuple(product(METHODS, NORMS))
BEYOND = (1.0, 1.15)  # radii, in units of the certified one


@dataclass(frozen=True)
class State:
    """A model and one image, the claim at its radius, and drop / loss."""

    model: Any
    x: Tensor
    label_B: Tensor
    claim: Claim
    ratio: float

    @staticmethod
    def of(
        model: Any, x: Tensor, method: str, norm: str, beyond: float = 1.0, eps_B: Tensor | None = None
    ) -> "State | None":
        """Return the state at `beyond` times the certified radius, or at eps; None if nothing is claimed."""
        analysis = analysis_of(model, x, method, norm)
        if analysis is None or not bool(analysis.clean.correct_B.all()):
            return None
        claim = claim_at(analysis, beyond * radius_of(analysis) if eps_B is None else eps_B)
        if not bool((claim.eps_B > 0).all() and claim.loss_B.isfinite().all()):
            return None
        label_B = analysis.clean.label_B
        found = float((drop(model, x, label_B, claim, norm) / claim.loss_B.clamp_min(1e-300)).amax())
        return State(model, x, label_B, claim, found)


def findings(seed: int, steps: int = CLIMB) -> Iterator[Finding]:
    """Run every kind of model with all methods and norms in turn."""
    for number in count(seed):
        turn, kind = divmod(number, len(KINDS))
        method, norm = CASES[number % len(CASES)]
        subject = Subject(KINDS[kind], list(SIZES)[(kind + turn) % len(SIZES)], number)
        start = State.of(subject.model(), subject.images(1), method, norm, BEYOND[turn % 2])
        if start is not None:
            best = climbed(start, method, norm, number, steps)
            where = {"kind": subject.kind, "weights": subject.weights, "seed": number, "first": start.ratio}
            yield Finding(f"{method} {norm}", best.ratio, steps + 1, where)


def climbed(state: State, method: str, norm: str, seed: int, steps: int) -> State:
    """Return the state after this number of steps."""
    generator, size = torch.Generator().manual_seed(seed), FIRST_STEP
    for _ in range(steps):
        model, x = _moved(state, size, norm, generator)
        other = State.of(model, x, method, norm, eps_B=state.claim.eps_B)
        if other is not None and other.ratio > state.ratio:
            state, size = other, 1.5 * size
        else:
            size /= 2
    return state


def _moved(state: State, size: float, norm: str, generator: torch.Generator) -> tuple[Any, Tensor]:
    """Return weights and image after a step along the gradient of log(drop), plus noise of the same size."""
    model = bake(state.model).to(next(state.model.parameters()).dtype).requires_grad_(True)
    x = state.x.clone().requires_grad_(True)
    towards = _worst(state, norm) - state.x.double()
    of = margin(model, state.label_B, state.claim.rival_B)
    fall = of(x) - of(x + towards.to(x))
    leaves = [x, *model.parameters()]
    gradients = torch.autograd.grad(fall.sum(), leaves, allow_unused=True)
    with torch.no_grad():
        for leaf, gradient in zip(leaves, gradients, strict=True):
            noise = torch.randn(leaf.shape, generator=generator).to(leaf)
            for direction in (noise, noise if gradient is None else gradient):
                length = torch.linalg.vector_norm(direction)
                if bool(length.isfinite() & (length > 0)):
                    leaf += size / 2 * torch.linalg.vector_norm(leaf) / length * direction
    return model.requires_grad_(False), x.detach().clamp(0, 1)


def _worst(state: State, norm: str) -> Tensor:
    """Return a point of the ball where the margin is low: some steps of projected ascent from the image."""
    x, of = state.x.double(), margin(bake(state.model), state.label_B, state.claim.rival_B)
    eps = state.claim.eps_B.view(-1, 1, 1, 1)
    generator = torch.Generator().manual_seed(0)
    change = 1e-3 * eps * torch.randn(x.shape, generator=generator, dtype=x.dtype)
    for _ in range(DESCENT):
        change.requires_grad_(True)
        (g,) = torch.autograd.grad(-of(x + change).sum(), change)
        if norm == "linf":
            change = (change.detach() + 0.5 * eps * g.sign()).clamp(-eps, eps)
        else:
            change = change.detach() + 0.5 * eps * g / g.flatten(1).norm(dim=1).clamp_min(1e-300).view(-1, 1, 1, 1)
            change = change * (eps / change.flatten(1).norm(dim=1).clamp_min(1e-300).view(-1, 1, 1, 1)).clamp(max=1)
    return x + change


@dataclass(frozen=True)
class Climbed(Subject):
    """A subject of benchmarks/trials.py with the weights at the end of an ascent against `adjoint`."""

    def model(self) -> Any:
        model = super().model()
        start = State.of(model, self.images(1), "adjoint", "l2")
        return model if start is None else climbed(start, "adjoint", "l2", self.seed, CLIMB).model

    @staticmethod
    def after(subject: Subject) -> "Climbed":
        return Climbed(subject.kind, subject.weights, subject.seed)
