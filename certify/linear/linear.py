"""Certificates by linear bounds: CROWN (Zhang et al. 2018; Xu et al. 2020) on the captured graph of a model.

    m_j(x') >= <a_j, x'> + b_j - rounding     for all x' of the ball, with a_j, b_j from one backward pass for m_j

The loss of rival j is m_j minus the least value of that bound. At eps = 0 it is the rounding of the model's answer.
Where a loss is hardly above its margin, slopes and planes are chosen for this margin (tuned.py).

Letters: B images, J classes, y the label, I some of the images.
"""

import math

import torch
from torch import Tensor, nn

from certify.linear.backward import Bounds, lowest
from certify.linear.capture import program_of
from certify.linear.enclosures.scalars import Elementwise, Scalar
from certify.linear.program import Program
from certify.linear.tuned import tuned
from certify.shared.bake import Model, model_of
from certify.shared.ball import L2, Ball, known
from certify.shared.certificate import Certificate, Clean, checked, decide, margin_rows, per_image, same_function
from zoo.bounds.first_order import trunk
from zoo.bounds.rule_table import NoRule

TOGETHER = 4  # images bounded at once
NEAR = 0.3  # the best slopes are searched for losses above a margin by less than this share of it


class LinearAnalysis:
    """Bounds computed for every eps anew; those at eps = 0 are kept."""

    failure = 0.0

    def __init__(self, clean: Clean, ball: Ball, program: Program, x_BCHW: Tensor) -> None:
        self.clean, self.ball, self._program, self._x = clean, ball, program, x_BCHW
        self._at_image: Tensor | None = None

    @torch.no_grad()
    def at(self, eps: float | Tensor) -> Certificate:
        eps_B = per_image(eps, self.clean)
        loss_BJ = self._losses(eps_B, (eps_B > 0) & self.clean.correct_B)
        if bool((eps_B == 0).any()):
            if self._at_image is None:
                self._at_image = self._losses(torch.zeros_like(eps_B), self.clean.correct_B)
            loss_BJ = torch.where((eps_B > 0)[:, None], loss_BJ, self._at_image)
        return decide(self.clean, loss_BJ, eps_B)

    def _losses(self, eps_B: Tensor, wanted_B: Tensor) -> Tensor:
        """Return the losses (B, J) of the wanted images, infinite for others."""
        loss_BJ = torch.full_like(self.clean.margin_BJ, torch.inf)
        for index_I in wanted_B.nonzero().flatten().split(TOGETHER):
            if len(index_I):
                loss_BJ[index_I] = self._loss(index_I, eps_B[index_I])
        return loss_BJ

    def _loss(self, index_I: Tensor, eps_I: Tensor) -> Tensor:
        margin_IJ, label_I = self.clean.margin_BJ[index_I], self.clean.label_B[index_I]
        rows_IJJ = margin_rows(label_I, margin_IJ)
        bounds = Bounds.on_balls(self._program, self._x[index_I].unsqueeze(1), eps_I, self.ball)
        low_IJ = lowest(bounds, rows_IJJ)
        near_I = ((low_IJ <= 0) & (rows_IJJ != 0).any(-1) & (low_IJ > -NEAR * margin_IJ)).any(1)
        if bool(near_I.any()):
            low_IJ = torch.maximum(low_IJ, torch.where(near_I[:, None], tuned(bounds, rows_IJJ, 0.0), -torch.inf))
        loss_IJ = margin_IJ - low_IJ
        return loss_IJ.scatter(1, label_I[:, None], 0.0)


class Linear:
    """The certifier of one model. The program is captured for the shape of the first images.

    Raises NoRule for a model with a module without rules, and `analyse` for an operation without linear bounds, or for
    more than `most` units with kinks. Proof: docs/proofs.md#linear-bounds.
    """

    def __init__(self, model: nn.Module | Model, norm: str = L2, most: float = math.inf) -> None:
        self.norm, self._most = known(norm), most
        self.model = model_of(model)
        self.baked = self.model.exact
        _, self.head = trunk(self.baked)
        self._programs: dict[tuple[int, ...], Program | NoRule] = {}

    @torch.no_grad()
    def analyse(self, images_BCHW: Tensor, labels_B: Tensor) -> LinearAnalysis:
        """Analyse images (B, C, H, W) in [0,1] with labels (B,) of the model's classes."""
        images, labels = checked(images_BCHW, labels_B, self.head)
        program = self._program(tuple(images.shape[1:]))
        clean = self.model.answers(images, labels)
        same_function(program.values(images.unsqueeze(1)), clean)
        return LinearAnalysis(clean, Ball(self.norm, images[0].numel()), program, images)

    def _program(self, shape: tuple[int, ...]) -> Program:
        """Return the program for images of a shape; the reason why there is none is remembered as well."""
        if shape not in self._programs:
            try:
                self._programs[shape] = self._captured(shape)
            except NoRule as refusal:
                self._programs[shape] = refusal
        found = self._programs[shape]
        if isinstance(found, NoRule):
            raise found
        return found

    def _captured(self, shape: tuple[int, ...]) -> Program:
        program = program_of(self.baked, shape)
        if (count := kinked_units(program)) > self._most:
            raise NoRule(self.baked, f"linear bounds: {count} units with kinks are more than {self._most}")
        return program


def kinked_units(program: Program) -> int:
    """Return the number of units with kinks, which are bounded one by one."""
    functions = [step for step in program.steps if isinstance(step, Elementwise)]
    return sum(math.prod(step.shape) for step in functions if isinstance(step.f, Scalar) and step.f.kinks)
