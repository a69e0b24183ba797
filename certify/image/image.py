"""The adjoint certificate with its remainders measured on the ball of images, not on a ball at every module.

For module i, let H_i be the change of its input and g_i the gradient of a margin at its output. Modules with quadratic
forms (`Forms`), such as hidden units, bound -<g_i, R_i> by <H_i, C_i H_i> / 2. With H_i = M_i u and |u|^2 <= Theta for
an image of the ball (ellipsoid.py),

    the margin falls by at most  the fall of <g_0, G>  +  lambda_max( sum_i M_i^T C_i M_i ) Theta / 2

plus the cost of modules without a form at |H_i|. Images seldom reach the worst direction of a form: this is often a
hundredth of ||C_i|| |H_i|^2. A rival that stays open is bounded again with both terms together (coupled.py), since no
image attains the worst of both. The result is the smaller of this bound and the adjoint one. Proofs:
docs/proofs.md#image-forms, docs/proofs.md#coupled, docs/proofs.md#slabs.

The maps M_i are built for one largest radius and hold for every smaller one: a *radius stage* (radius_stage.py). They
prove most at the largest, so a single eps has a stage of its own, and stages around other centers for the rivals that
it leaves open (slabs.py). A search asks many, and answers them from a few stages: the first one of an image is at its
expected radius; later ones go up or down (certify/image/schedule.py).

Letters: B images, J classes, C rivals of each, I some of the images; e the radius of the L2 ball around a ball of eps.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from certify.adjoint.adjoint import Adjoint, AdjointAnalysis
from certify.ellipsoids.budget import Budget, budget
from certify.ellipsoids.columns import Columns
from certify.ellipsoids.weights import estimate_weights
from certify.image.radius_stage import Cut, RadiusStage
from certify.image.schedule import RadiusSchedule
from certify.image.situation import Situation
from certify.image.slabs import Slabs
from certify.shared.ball import Ball
from certify.shared.certificate import Breakdown, Certificate, Clean, binding_class, decide_by, open_pairs, per_image
from zoo.arithmetic import nan_to_inf
from zoo.bounds.tape import Tape

MAX_STAGES = 8
SETTLED = 1.25  # two successive estimates that differ by a smaller factor need no third one
FIRST_STAGE, SEARCH_START = 1.0, 0.8  # in units of the expected e: the first stage, and the start of a search
RAISE, RAISES = 1.2, 8  # factor and number of steps by which `_grow_while_proved` grows e
MOST = 2.0**10
NEAR_END = 0.95  # of the radius where the first order alone uses up the margin: no stage is tried there first
FEW_RIVALS = 16  # rivals whose gradients give the expected radius


@dataclass(frozen=True)
class FirstOrder:
    """The radius at which the first-order term alone uses up a margin, and the rival that it belongs to, (B,) each.

    `end_B` is that radius for the closest rivals, `first_B` the first-order loss at e = 1, `margin_B` the margin, and
    `class_B` the rival's class.
    """

    end_B: Tensor
    first_B: Tensor
    margin_B: Tensor
    class_B: Tensor


@dataclass
class Level:
    """One radius stage for all images that have one here, open or not.

    A search for their radii will need it anyway, and building it for all of them together is cheaper.
    """

    schedule: RadiusSchedule
    index_I: Tensor
    stage: RadiusStage

    @staticmethod
    def of(schedule: RadiusSchedule, build: Callable[[Tensor, Tensor], RadiusStage]) -> "Level":
        """Build the stage of these images; `build` takes their indices and the largest radii of the whole batch."""
        index_I = (~schedule.most_B.isnan()).nonzero().flatten()
        return Level(schedule, index_I, build(index_I, schedule.most_B))

    @cached_property
    def next(self) -> RadiusSchedule:
        """The schedule after this stage, past what the adjoint analysis proves; NaN where it promises little."""
        most_B, index_I, here = self.schedule.most_B, self.index_I, self.stage.here
        reach_B = torch.full_like(most_B, torch.nan).index_put((index_I,), self.stage.reach_B)

        def proved(e_B: Tensor) -> Tensor:
            sure_B = torch.zeros_like(most_B, dtype=torch.bool)
            return sure_B.index_put((index_I,), here.proved(e_B[index_I]))

        return self.schedule.after(reach_B).skip_proved(proved, self.stage.ellipsoids.budget.gain)


class ImageAnalysis:
    """The analysis of a batch of correctly classified images.

    The adjoint analysis answers every eps first. Forms on the ball of images bound what it leaves open. `levels` are
    those of the search so far.
    """

    def __init__(
        self,
        inner: AdjointAnalysis,
        images_BCHW: Tensor,
        seed: bytes,
        around: Callable[[Tensor, Tensor], AdjointAnalysis],
    ) -> None:
        self.inner, self.images, self._seed = inner, images_BCHW, seed
        self._slabs = Slabs(around, self._stage, seed)
        self.levels = list[Level]()
        self._failure_B = torch.zeros_like(inner.clean.margin_BJ[:, 0])  # of the stages of single eps

    @property
    def clean(self) -> Clean:
        return self.inner.clean

    @property
    def ball(self) -> Ball:
        return self.inner.ball

    @property
    def beyond(self) -> float:
        """The factor by which the method is likely to prove more than `expected_B`."""
        return 1.0

    @property
    def failure(self) -> float:
        failure_B = self._failure_B.clone()
        for level in self.levels:
            failure_B[level.index_I] += level.stage.failure_B
        return self.inner.failure + float(failure_B.max())

    def guess(self) -> Tensor:
        return self.ball.eps_within(SEARCH_START * self.beyond * self.expected_B)

    def at(self, eps: float | Tensor) -> Certificate:
        large = self._budget.large  # where a stage takes too long to serve a single eps
        return self._certified(eps, self._lower_in_search if large else self._lower_alone)

    def in_search(self, eps: float | Tensor) -> Certificate:
        return self._certified(eps, self._lower_in_search)

    @torch.no_grad()
    def _certified(self, eps: float | Tensor, lower: Callable[[Tensor, Tensor], None]) -> Certificate:
        """Return the certificate; `lower` lowers, in place, the losses at e (B,) that the adjoint analysis leaves."""
        eps_B = per_image(eps, self.clean)
        e_B = self.ball.radius(eps_B)
        loss_BJ, class_B = self._unknown() if self._budget.large else self._answered(e_B)
        open_B = _open(self.clean, loss_BJ)
        if bool(open_B.any()):
            lower(e_B, loss_BJ)
            won_B = open_B & ~_open(self.clean, loss_BJ)
            class_B = torch.where(won_B, binding_class(self.clean, loss_BJ), class_B)
        return decide_by(self.clean, loss_BJ, eps_B, class_B)

    def breakdown(self, eps: float | Tensor) -> Breakdown:
        """Return the breakdown of the adjoint analysis."""
        return self.inner.breakdown(eps)

    @cached_property
    def _budget(self) -> Budget:
        return budget(Tape(self.inner.chain.expansions))

    def _answered(self, e_B: Tensor) -> tuple[Tensor, Tensor]:
        """Return the adjoint losses and deciding classes.

        What the adjoint analysis subtracts from margins is added to the losses instead.
        """
        kept, loss_BJ, class_B = self.inner.answered(e_B)
        own_BJ = torch.isinf(self.clean.margin_BJ)
        kept_BJ = (self.clean.margin_BJ - kept.margin_BJ).masked_fill(own_BJ, 0.0)
        return nan_to_inf(loss_BJ + kept_BJ), class_B

    def _unknown(self) -> tuple[Tensor, Tensor]:
        """Return infinite losses instead of the adjoint ones, for a large model: forms do all the work."""
        margin_BJ = self.clean.margin_BJ
        loss_BJ = torch.full_like(margin_BJ, torch.inf).scatter(1, self.clean.label_B[:, None], 0.0)
        return loss_BJ, binding_class(self.clean, torch.zeros_like(loss_BJ))

    def _lower_alone(self, e_B: Tensor, loss_BJ: Tensor) -> None:
        """Lower the losses of open images by a stage for this e, unless the first order alone uses up a margin."""
        (index_I,) = torch.where(_open(self.clean, loss_BJ) & (e_B > 0) & (e_B < self._first_order.end_B))
        if len(index_I):
            stage = self._stage(self._situation(index_I), e_B[index_I], self._slabs)
            loss_BJ[index_I] = stage.losses(e_B[index_I], loss_BJ[index_I])
            self._failure_B[index_I] += stage.failure_B

    def _lower_in_search(self, e_B: Tensor, loss_BJ: Tensor) -> None:
        """Lower the losses stage by stage while an image is open."""
        clean, schedule, open_B = self.clean, self._first, _open(self.clean, loss_BJ)
        for number in range(MAX_STAGES):
            open_B = open_B & schedule.may_decide(e_B)
            if not bool(open_B.any()):
                break
            if number == len(self.levels):
                self.levels.append(Level.of(schedule, self._level))
            level = self.levels[number]
            schedule = level.next  # before `_lower`, as it bounds rivals: answers must not depend on earlier ones
            self._lower(level, e_B, loss_BJ, open_B)
            open_B = open_B & _open(clean, loss_BJ)

    def _lower(self, level: Level, e_B: Tensor, loss_BJ: Tensor, open_B: Tensor) -> None:
        """Lower, in place, the losses of the open images whose radius lies within this stage."""
        index_I, stage = level.index_I, level.stage
        asked_I = open_B[index_I] & (e_B[index_I] < stage.most_B)
        if bool(asked_I.any()):
            found_IJ = stage.losses(torch.where(asked_I, e_B[index_I], 0.0), loss_BJ[index_I])
            loss_BJ[index_I] = torch.where(asked_I[:, None], found_IJ, loss_BJ[index_I])

    @cached_property
    @torch.no_grad()
    def _first_order(self) -> FirstOrder:
        class_CB = self.inner.rivals_BR[:, :FEW_RIVALS].mT
        first_CB, margin_CB = self._whole.first(class_CB), self.clean.margin_BJ.gather(1, class_CB.mT).mT
        end_B, rank_B = (margin_CB / first_CB).nan_to_num(MOST).min(0)
        return FirstOrder(end_B, *(t.gather(0, rank_B[None])[0] for t in (first_CB, margin_CB, class_CB)))

    @cached_property
    @torch.no_grad()
    def expected_B(self) -> Tensor:
        """The radius e that stages are likely to prove: below min_j m_j / |g_0|, since remainders take their share."""
        here, alone = self._whole, self._first_order
        g = here.gradients(alone.class_B[None]).leaves
        above_B, below_B = alone.end_B.clamp_max(MOST), torch.zeros_like(alone.end_B)
        most_B = self._budget.start * above_B
        settled_B = torch.zeros_like(self.clean.correct_B)  # per image: independent of the rest of the batch
        for _ in range(self._budget.rounds):
            estimate = estimate_weights(here.tape, self.images, most_B, g, here.draw, here.sizes)
            found_B = estimate.radius(alone.first_B, alone.margin_B)
            above_B = torch.where(found_B < most_B, most_B, above_B)
            below_B = torch.where(found_B < most_B, below_B, most_B)
            next_B = (most_B * torch.where(found_B < most_B, found_B, above_B)).sqrt()
            next_B = torch.maximum(next_B, (below_B * above_B).sqrt())
            next_B = torch.where(settled_B, most_B, next_B)
            settled_B = settled_B | (torch.maximum(next_B / most_B, most_B / next_B) < SETTLED)
            most_B = next_B
            if bool(settled_B.all()):
                break
        return _grow_while_proved(here, torch.where(settled_B | (below_B == 0), most_B, below_B))

    @cached_property
    @torch.no_grad()
    def _first(self) -> RadiusSchedule:
        """The first schedule; NaN where no radius is expected."""
        end_B = self._first_order.end_B
        most_B = torch.minimum(self.beyond * self.expected_B, torch.maximum(self.expected_B, NEAR_END * end_B))
        first = RadiusSchedule.first(FIRST_STAGE * most_B, end_B)
        return first.skip_proved(self._whole.proved, self._budget.gain)

    @cached_property
    def _whole(self) -> Situation:
        """The situation of all images."""
        return self._situation(torch.arange(len(self.images), device=self.images.device))

    @property
    def kind(self) -> type[RadiusStage]:
        return RadiusStage

    def _stage(self, here: Situation, most_B: Tensor, cut: Cut | None = None) -> RadiusStage:
        return self.kind(here, most_B, self._columns, cut)

    def _level(self, index_I: Tensor, most_B: Tensor) -> RadiusStage:
        return self._stage(self._situation(index_I), most_B[index_I])

    @cached_property
    @torch.no_grad()
    def _columns(self) -> Columns | None:
        """The columns of the first nonlinear leaf, which are the same for all images."""
        return Columns.of(self._whole.tape, self.images)

    def _situation(self, index_I: Tensor) -> Situation:
        return Situation.of(self.inner, self.images, index_I, self._seed)


def _grow_while_proved(here: Situation, e_B: Tensor) -> Tensor:
    """Grow radii to about what the adjoint analysis proves, where that is more."""
    raised_B = torch.ones_like(e_B, dtype=torch.bool)
    for _ in range(RAISES):
        raised_B = raised_B & here.proved(torch.where(raised_B, RAISE * e_B, 0.0))  # eps = 0 costs nothing
        if not bool(raised_B.any()):
            break
        e_B = torch.where(raised_B, RAISE * e_B, e_B)
    return e_B


def _open(clean: Clean, loss_BJ: Tensor) -> Tensor:
    """Return the images with a margin that may be lost."""
    return open_pairs(clean, loss_BJ).any(-1)


class Image(Adjoint):
    """The certifier of one model, used like `Adjoint`. Raises NoRule for the same models."""

    def closer(self, images_BCHW: Tensor, clean: Clean) -> ImageAnalysis:
        return ImageAnalysis(self.expand(images_BCHW, clean), images_BCHW, self._seed, self.around)
