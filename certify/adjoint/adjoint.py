"""The adjoint certificate: the gradient of each margin weighs the second-order remainder of every layer.

Letters: B images, J classes; X_0 -> X_1 = f_1(X_0) -> ... -> X_K the nodes of the model, m_j = <w_y - w_j, X_K> + a
constant; J_k = Df_k at the clean X_{k-1}, R_k its remainder, G_k = X'_k - X_k, g_{k,j} the gradient of m_j at X_k.

    m_j(x') >= m_j(x) - min_c [ ||g_{c,j}|| e_c + sum_{k>c} rem_{k,j}(e_{k-1}) ],         ||G_k|| <= e_k

(docs/proofs.md#adjoint-certificate; c = K is the LoFAST test of pairs.) The radii, with P_k = J_k ... J_1:

    G_k = P_k (x' - x) + rest,    ||rest|| <= rho_k,
    e_k = min( lip_k(e_{k-1}),  ||J_k|| e_{k-1} + beta_k(e_{k-1}),  ||P_k|| e_0 + rho_k ),
    rho_k = min( ||J_k|| rho_{k-1} + beta_k(e_{k-1}),  e_k + ||P_k|| e_0 ).

e_0 is the radius of the L2 ball around the ball of images, and ||g_0|| e_0 the cost of the first order on that ball
(certify/shared/ball.py).

||J_k|| is the norm of I + J_branch, and ||P_k|| that of the product (certify/adjoint/operator_norms.py).
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from certify.adjoint.backwards import Chain, Radii, Rivals
from certify.adjoint.operator_norms import Norms, operator_norms
from certify.shared.bake import SERVED, Model, model_of
from certify.shared.ball import L2, Ball, known
from certify.shared.batching import CorrectImages, analyse_correct
from certify.shared.breakdown import names, shares
from certify.shared.certificate import (
    Breakdown,
    Certificate,
    Clean,
    Explained,
    binding_class,
    checked,
    decide_by,
    gaps,
    lowered,
    margins_of,
    pair_weights,
    per_image,
)
from zoo.arithmetic import nan_to_inf, product
from zoo.bounds import float_error, lanczos
from zoo.bounds.contracts import Bound
from zoo.bounds.curvature import nodes_of
from zoo.bounds.first_order import trunk
from zoo.bounds.rule_table import together

BYTES = 2**31  # memory for the terms of the images that are analysed together, and for those of their rivals
PAIR = 16  # bytes per entry and token, approximately


@dataclass(frozen=True)
class Step:
    """One node around a clean batch."""

    name: str
    lip: Bound
    beta: Bound
    defect_B: Tensor  # ||X_k - f_k(X_{k-1})||: the clean points are rounded
    rounding_B: Tensor  # rounding of products with J_k^T, relative to the length

    def off(self, e_B: Tensor) -> Tensor:
        """Bound the errors at the node's end and of products with the gradient there, for inputs within e: (B,)."""
        return self.defect_B + product(self.rounding_B, e_B)


class AdjointAnalysis:
    """The stored terms of a batch of correct images; every eps is answered from them, without a forward pass.

    Rivals are bounded in groups, the closest one first, and cheap bounds come before expensive ones (backwards.py): the
    test of pairs ||w_y - w_j|| e_K, which is the cut c = K; gradients with beta, which may prove the margin; gradients
    alone, which may show that no remainder can help; and only then remainders. Once an image is lost, its other rivals
    are skipped.
    """

    def __init__(
        self, clean: Clean, steps: Sequence[Step], chain: Chain, head: nn.Linear, measure: Callable[[], Norms], few: int
    ) -> None:
        self.clean, self.steps, self.chain, self.measure = clean, steps, chain, measure
        self.weight_BJ = pair_weights(head, clean.label_B)
        self.rivals_BR = clean.margin_BJ.argsort(-1)[:, :-1]  # the label's own margin is infinite
        self.head, self.few, self._groups = head, few, dict[tuple[int, int], Rivals]()

    @property
    def ball(self) -> Ball:
        return self.chain.ball

    @cached_property
    def norms(self) -> Norms:
        """The norms ||J_k|| and ||P_k||, measured on first use."""
        with torch.no_grad():
            return self.measure()

    @property
    def failure(self) -> float:
        return self.norms.failure if "norms" in vars(self) else 0.0

    def at(self, eps: float | Tensor) -> Certificate:
        eps_B = per_image(eps, self.clean)
        clean, loss_BJ, class_B = self.answered(self.ball.radius(eps_B))
        return decide_by(clean, loss_BJ, eps_B, class_B)

    def answered(self, e_B: Tensor) -> tuple[Clean, Tensor, Tensor]:
        """Return the margins, their losses (B, J) and the deciding class within L2 balls of e_0."""
        radii = self.radii_within(e_B)
        return self.within(radii), *self.losses(radii)

    def off_behind(self, node: int, r_B: Tensor) -> Tensor:
        """Bound how far the output of a node is from X_k + J_k G + R_k, for inputs within r: (B,)."""
        return self.steps[node].defect_B

    def kept(self, r_B: Tensor) -> Tensor:
        """Return what to subtract from the clean margins for features within r, (B, J): nothing here."""
        return torch.zeros_like(self.clean.margin_BJ)

    def within(self, radii: Radii) -> Clean:
        """Return the clean margins less what `kept` subtracts within these radii."""
        kept_BJ = self.kept(radii.e[-1]).nan_to_num(torch.inf)
        return replace(self.clean, margin_BJ=self.clean.margin_BJ - kept_BJ)

    @torch.no_grad()
    def losses(self, radii: Radii) -> tuple[Tensor, Tensor]:
        """Return the largest loss of every margin (B, J) and the class that decides (B,).

        The deciding class is the one that comes closest to taking over; for a lost image, the first one that was found
        open.
        """
        clean = self.within(radii)
        margin_RB = clean.margin_BJ.gather(1, self.rivals_BR).mT
        loss_BJ = nan_to_inf(product(self.weight_BJ, radii.e[-1][:, None]))
        loss_RB = loss_BJ.gather(1, self.rivals_BR).mT.contiguous()
        decider_B = torch.full_like(self.clean.label_B, -1)  # the rival's rank, once the image is lost
        for start, end in groups(len(margin_RB)):
            margin, loss = margin_RB[start:end], loss_RB[start:end]  # views: assignments to `loss` change loss_RB
            asked = ~(gaps(margin, loss) > 0) & (decider_B < 0)
            if not bool(asked.any()):
                continue
            rivals = self.rivals(start, end)
            loss[:] = torch.where(asked, torch.minimum(loss, rivals.coarse(radii)), loss)
            hopeless = asked & ~(gaps(margin, rivals.first(radii).amin(0)) > 0)
            worst = one_hot(torch.where(hopeless, loss - margin, -torch.inf).argmax(0), len(margin)).mT > 0
            # One remainder is enough for a lost image; its loss then grows with eps as the others' do.
            wanted = asked & torch.where(hopeless.any(0), worst, ~(gaps(margin, loss) > 0))
            loss[:] = torch.minimum(loss, rivals.tight(radii, wanted))
            lost = hopeless | (wanted & ~(gaps(margin, loss) > 0))
            worst_B = start + torch.where(lost & wanted, loss - margin, -torch.inf).argmax(0)
            decider_B = torch.where(lost.any(0), worst_B, decider_B)
        loss_BJ = loss_BJ.scatter(1, self.rivals_BR, loss_RB.mT)
        lost_to_B = self.rivals_BR.gather(1, decider_B.clamp_min(0)[:, None])[:, 0]
        return loss_BJ, torch.where(decider_B < 0, binding_class(clean, loss_BJ), lost_to_B)

    def rivals(self, start: int, end: int) -> Rivals:
        """Return every image's rivals of these ranks, 0 the closest; their gradients are computed on first use."""
        if (start, end) not in self._groups:
            weight = self.head.weight
            g_RBD = weight[self.clean.label_B] - weight[self.rivals_BR[:, start:end].mT]
            self._groups[start, end] = Rivals(self.chain, g_RBD, self.few)
        return self._groups[start, end]

    def radii(self, eps_B: Tensor) -> Radii:
        """Return the radii of balls of eps in their norm; all radii are L2."""
        return self.radii_within(self.ball.radius(eps_B))

    def radii_within(self, e_B: Tensor) -> Radii:
        """Return the radii of L2 balls of e_0. NaN counts as infinite. Proof: docs/proofs.md#radii."""
        radii, betas, offs, rho_B = [e_B], [], [], torch.zeros_like(e_B)
        for step, norm_B, prefix_B in zip(self.steps, self.norms.nodes, self.norms.products, strict=True):
            e_B = radii[-1]
            off_B = step.off(e_B)
            offs.append(off_B)
            beta_B = nan_to_inf(step.beta(e_B) + off_B)
            betas.append(beta_B)
            bound_B = torch.fmin(step.lip(e_B) + step.defect_B, product(norm_B, e_B) + beta_B)
            linear_B = product(prefix_B, radii[0])
            rho_B = nan_to_inf(product(norm_B, rho_B) + beta_B)
            bound_B = nan_to_inf(torch.fmin(bound_B, linear_B + rho_B))
            rho_B = torch.fmin(rho_B, bound_B + linear_B)
            radii.append(bound_B)
        return Radii(radii, betas, offs)

    @torch.no_grad()
    def breakdown(self, eps: float | Tensor) -> Breakdown:
        """Return the share of the first order and of every node's remainder in the loss of the binding class."""
        radii = self.radii(per_image(eps, self.clean))
        _, binding_B = self.losses(radii)
        weight = self.head.weight
        g_1BD = (weight[self.clean.label_B] - weight[binding_B])[None]
        image_B = torch.arange(len(binding_B), device=binding_B.device)
        _, pairs = Rivals(self.chain, g_1BD, self.few).pairs(torch.zeros_like(image_B), image_B)
        return shares([step.name for step in self.steps], pairs.lengths, radii.e, pairs.remainders(radii))


def groups(ranks: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of ranks that are bounded together: the closest rival, the next 8, then 64 at a time."""
    start, size = 0, 1
    while start < ranks:
        yield start, min(ranks, start + size)
        start, size = start + size, min(8 * size, 64)


class Adjoint:
    """The certifier of one model: weights are measured once, here; images by `analyse`; eps by `AdjointAnalysis.at`.

    `nonce` chooses the random starts of norms (zoo/bounds/lanczos.py); None draws a new one. `norm` is that of the
    balls (certify/shared/ball.py). Raises NoRule for a model with a module that has no rule of first or of second
    order.
    """

    types: Collection[torch.dtype] = SERVED

    def __init__(self, model: nn.Module | Model, nonce: str | None = None, norm: str = L2) -> None:
        self.norm = known(norm)
        self.model = model_of(model, self.types)
        self.baked = self.model.exact
        self.nonce = nonce or lanczos.new_nonce()
        self._seed = lanczos.seed_of(self.baked, self.nonce)
        self.links, self.head = trunk(self.baked)
        nodes = together(nodes_of, self.links)
        self.nodes = [node for of_link in nodes for node in of_link]
        self.ends = list(accumulate(map(len, nodes)))  # where each link ends, counted in nodes
        self.names = names(self.baked, [layer for layer, _ in self.nodes])

    @torch.no_grad()
    def analyse(self, images_BCHW: Tensor, labels_B: Tensor) -> CorrectImages:
        """Analyse images (B, C, H, W) in [0,1] with labels (B,) of the model's classes."""
        images, labels = checked(images_BCHW, labels_B, self.head)
        clean = self.model.answers(images, labels)
        few, ball = self.together(images, clean), Ball(self.norm, images[0].numel())
        return analyse_correct(clean, ball, few, lambda index_I: self.closer(images[index_I], clean[index_I]))

    def together(self, images_BCHW: Tensor, clean: Clean) -> int:
        """Return how many images fit the memory."""
        return self._few(images_BCHW)

    def _few(self, images_BCHW: Tensor) -> int:
        """Return how many images, or pairs of an image and a rival, fit the memory.

        In attention every pair of tokens has a vector of its own.
        """
        y = self.nodes[0][0](images_BCHW[:1])[0]
        return max(1, BYTES // (PAIR * len(self.nodes) * y.numel() * (y.shape[1] if y.ndim == 3 else 1)))

    def closer(self, images_BCHW: Tensor, clean: Clean) -> Explained:
        """Return the analysis of these images, all of them correct."""
        return self.expand(images_BCHW, clean)

    def around(self, points_BCHW: Tensor, labels_B: Tensor) -> AdjointAnalysis:
        """Return the adjoint terms of L2 balls around any points, float64; margins of these labels have any sign."""
        margin_BJ, known_B = margins_of(self.baked(points_BCHW), labels_B), torch.ones_like(labels_B, dtype=torch.bool)
        clean = Clean(labels_B, labels_B, margin_BJ, known_B, self.model.require_unchanged)
        return self.expand(points_BCHW, clean, L2)

    def expand(self, images_BCHW: Tensor, clean: Clean, norm: str | None = None) -> AdjointAnalysis:
        """Return the adjoint terms of these images, float64, all of them correct; of balls in the certifier's norm."""
        points, lips, expansions = [images_BCHW], [], []
        for layer, expand in self.nodes:
            lips.append(layer(points[-1])[1])
            expansions.append(expand(points[-1]))
            points.append(expansions[-1].y)
        clean = lowered(self.head, points[-1], clean)
        defects = float_error.defects(self.links, self.ends, points)
        betas = [expansion.beta for expansion in expansions]
        roundings = [expansion.rounding for expansion in expansions]
        steps = [Step(*of_node) for of_node in zip(self.names, lips, betas, defects, roundings, strict=True)]
        ball = Ball(norm or self.norm, images_BCHW[0].numel())
        chain = Chain(ball, [expand for _, expand in self.nodes], points, expansions)
        measure = partial(operator_norms, expansions, images_BCHW, self._seed)
        return AdjointAnalysis(clean, steps, chain, self.head, measure, self._few(images_BCHW))
