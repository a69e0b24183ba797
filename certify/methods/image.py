"""The adjoint certificate with its remainders measured on the ball of images, not on a ball at every module.

Of module i let H_i be the change of its input, A_i the Jacobian of that input at the clean image, R_i = B_i r_i its
remainder and g_i the gradient of a margin at its output. For an image that moves by G, |G| <= eps = rho_0,

    H_i = A_i G + sum_{k<i} J_{k->i} B_k r_k,          |r_k| <= rho_k,

J_{k->i} from the output of module k to the input of module i. Modules that have quadratic forms (`Forms`), all but
attention, bound -<g_i, R_i> by <H_i, C_i H_i> / 2 and |r_i|^2 by <H_i, C'_i H_i>. The square root of a sum of forms
is a seminorm of (H_i), so with F_k the linear map from r_k (from G for k = 0) to (C_i^(1/2) H_i)

    the margin falls by at most  |g_0| eps + ( sum_k ||F_k|| rho_k )^2 / 2,          rho_i <= sum_{k<i} ||F'_k|| rho_k

plus the constants of forms, plus what modules without a form cost in the adjoint certificate on |H_i|. The worst
direction of a form is seldom one that images reach: this is often a tenth of ||C_i|| |H_i|^2. The lesser of this and of
the adjoint certificate counts.
Proof: docs/proofs.md#image-forms.

Letters: B images, J classes, C rivals of each, M random vectors.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from certify.methods.adjoint import Adjoint, AdjointAnalysis, groups
from certify.methods.certificate import Breakdown, Certificate, Clean, binding_class, decide_by, gaps, per_image
from zoo.arithmetic import nan_to_inf, product
from zoo.bounds import lanczos
from zoo.bounds.contracts import Forms, QuadraticForm
from zoo.bounds.tape import Tape

PROBES = 512  # random vectors that find how far a unit reaches: a third more than it does
PROBE_BYTES = 2**27  # memory for those that are pushed at once, about
PROBE_FAILURE = 1e-11  # the chance that one reach of an image is too small


Sizes = dict[int, Tensor]  # of the leaves: rho (B,)


@dataclass(frozen=True)
class Lengths:
    """What does not depend on eps, of every leaf that bends: the norms of the maps to its input, and those of the maps
    to the functionals of its forms; from the image, and from remainders in front of it. (B, ...) each."""

    by_image: Tensor
    by_rest: dict[int, Tensor]
    reach_by_image: Tensor | None
    reach_by_rest: dict[int, Tensor]


class ImageAnalysis:
    """Of a batch of correct images: every eps is answered by the adjoint analysis first, and what that leaves open by
    forms on the ball of images, the closest rival first."""

    def __init__(self, inner: AdjointAnalysis, images_BCHW: Tensor, seed: bytes) -> None:
        self.inner, self.images, self.tape = inner, images_BCHW, Tape(inner.chain.expansions)
        self._seed = seed
        self._runs = 0  # of Lanczos, of an image

    @property
    def clean(self) -> Clean:
        return self.inner.clean

    @property
    def failure(self) -> float:
        return self.inner.failure + self._runs * lanczos.FAILURE + (PROBE_FAILURE if self._runs else 0.0)

    def at(self, eps: float | Tensor) -> Certificate:
        eps_B = per_image(eps, self.clean)
        loss_BJ, class_B = self.inner.losses(self.inner.radii(eps_B))
        loss_BJ, class_B = self._sharper(eps_B, loss_BJ, class_B)
        return decide_by(self.clean, loss_BJ, eps_B, class_B)

    def breakdown(self, eps: float | Tensor) -> Breakdown:
        """That of the adjoint analysis."""
        return self.inner.breakdown(eps)

    @torch.no_grad()
    def _sharper(self, eps_B: Tensor, loss_BJ: Tensor, class_B: Tensor) -> tuple[Tensor, Tensor]:
        """The losses again, those of open rivals on the ball of images: until one of an image stays open."""
        margin_BJ = self.clean.margin_BJ
        open_BJ = ~(gaps(margin_BJ, loss_BJ) > 0) & torch.isfinite(margin_BJ) & (eps_B > 0)[:, None]
        rivals_BR = torch.where(open_BJ, margin_BJ, torch.inf).argsort(-1)
        count_B, lost_B, rho = open_BJ.sum(-1), torch.zeros_like(self.clean.correct_B), dict[int, Tensor]()
        for start, end in groups(int(count_B.max()) if len(count_B) else 0):
            class_CB = rivals_BR[:, start:end].mT
            asked_CB = (torch.arange(start, end, device=eps_B.device)[:, None] < count_B) & ~lost_B
            margin_CB, old_CB = (t.gather(1, class_CB.mT).mT for t in (margin_BJ, loss_BJ))
            g_0, g = self._gradients(class_CB)
            first_CB = product(torch.linalg.vector_norm(g_0.flatten(2), dim=-1), eps_B)
            asked_CB &= (~asked_CB | (gaps(margin_CB, first_CB) > 0)).all(0)  # what no remainder can mend stays
            if bool(asked_CB.any()):
                rho = rho or self._rests(eps_B)
                found_CB = nan_to_inf(first_CB + self._remainders(g, eps_B, rho, start) + self._rounded(g))
                loss_CB = torch.where(asked_CB, torch.minimum(found_CB, old_CB), old_CB)
                loss_BJ = loss_BJ.scatter(1, class_CB.mT, loss_CB.mT)
            still_BJ = ~(gaps(margin_BJ, loss_BJ) > 0) & open_BJ
            lost_B = lost_B | still_BJ.gather(1, class_CB.mT).any(-1)
        won_B = open_BJ.any(-1) & ~lost_B
        return loss_BJ, torch.where(won_B, binding_class(self.clean, loss_BJ), class_B)

    def _gradients(self, class_CB: Tensor) -> tuple[Tensor, dict[int, Tensor]]:
        """Of the margins over these classes: at the image, and at the output of every leaf."""
        weight = self.inner.head.weight
        g_CBD = weight[self.clean.label_B] - weight[class_CB]
        g_0, seen = self.tape.pull(g_CBD.view(len(g_CBD), *self.inner.chain.points[-1].shape), {})
        assert g_0 is not None
        return g_0, seen

    def _remainders(self, g: dict[int, Tensor], eps_B: Tensor, rho: Sizes, group: int) -> Tensor:
        """What the modules' remainders can cost of margins with these gradients: (C, B)."""
        forms, total_CB = dict[int, QuadraticForm](), eps_B.new_zeros(())
        for at in self.tape.bent:
            leaf = self.tape.leaves[at]
            if leaf.forms is None:
                total_CB = total_CB + nan_to_inf(leaf.remainder(g[at])(self._radius(at, eps_B, rho)))
            else:
                forms[at] = leaf.forms.of_gradient(g[at], self._reach(at, eps_B, rho))
        if not forms:
            return total_CB
        count = len(next(iter(g.values())))
        for form in forms.values():
            total_CB = total_CB + form.constant
        return total_CB + 0.5 * self._seminorm(forms, eps_B, rho, count, f"rivals {group}").square()

    def _rests(self, eps_B: Tensor) -> Sizes:
        """rho of every leaf that bends but the last, one after the other."""
        rho = Sizes()
        for at in self.tape.bent[:-1]:
            leaf = self.tape.leaves[at]
            if leaf.forms is None:
                rho[at] = nan_to_inf(leaf.beta(self._radius(at, eps_B, rho)))
            else:
                form = leaf.forms.of_rest(self._reach(at, eps_B, rho))
                rho[at] = nan_to_inf(self._seminorm({at: form}, eps_B, rho, 1, f"rest {at}")[0])
        return rho

    def _radius(self, at: int, eps_B: Tensor, rho: Sizes) -> Tensor:
        """|H_i| (B,)."""
        lengths = self._lengths[at]
        by_image_B = product(lengths.by_image, eps_B) + self._drifts[at]
        return sum((product(norm_B, rho[k]) for k, norm_B in lengths.by_rest.items()), by_image_B)

    def _reach(self, at: int, eps_B: Tensor, rho: Sizes) -> Tensor:
        """Of the functionals of its forms (B, ...)."""
        lengths, forms = self._lengths[at], self.tape.leaves[at].forms
        assert forms is not None
        assert lengths.reach_by_image is not None
        whole = [
            (lengths.reach_by_image, eps_B),
            (_beside(torch.ones_like(eps_B), lengths.reach_by_image) * forms.sizes, self._drifts[at]),
        ]
        whole += [(by, rho[k]) for k, by in lengths.reach_by_rest.items()]
        return torch.stack(torch.broadcast_tensors(*(product(by, _beside(size_B, by)) for by, size_B in whole))).sum(0)

    def _seminorm(self, forms: dict[int, QuadraticForm], eps_B: Tensor, rho: Sizes, count: int, word: str) -> Tensor:
        """(sum_i <H_i, C_i H_i>)^(1/2), at most: (C, B)."""
        last = max(forms)

        def by_image(v: Tensor) -> Tensor:
            g, _ = self.tape.pull(None, self._applied(forms, self.tape.push(v, {}, last)))
            return torch.zeros_like(v) if g is None else g

        drift_CB = torch.stack([product(form.largest, self._drifts[at].square()) for at, form in forms.items()]).sum(0)
        total_CB = product(self._norms(by_image, self.images.shape[1:], count, word, eps_B), eps_B) + drift_CB.sqrt()
        sources = {k: rho[k] for k in rho if k < last}
        if not any(bool((size_B > 0).any()) for size_B in sources.values()):
            return total_CB
        unknown_B = torch.stack([torch.isinf(size_B) for size_B in sources.values()]).any(0)
        sources = {k: torch.where(unknown_B, 0.0, size_B) for k, size_B in sources.items()}
        # Of several maps in one norm: |sum_k F_k r_k| <= (sum_k t_k)^(1/2) ||[F_k rho_k / t_k^(1/2)]||, for all t > 0.
        share = {
            k: (product(size_B, self._lengths[last].by_rest[k])).clamp_min(1e-200) for k, size_B in sources.items()
        }
        factor = {k: size_B / share[k].sqrt() for k, size_B in sources.items()}
        rooms = {k: self.tape.room(k) for k in sources}

        def by_rest(v: Tensor) -> Tensor:
            pieces = zip(sources, v.split([room.numel() for room in rooms.values()], -1), strict=True)
            entering = {k: (u * factor[k][:, None]).unflatten(-1, rooms[k]) for k, u in pieces}
            _, seen = self.tape.pull(None, self._applied(forms, self.tape.push(None, entering, last)))
            back = [self.tape.collected(seen, k).flatten(2) * factor[k][:, None] for k in sources]
            return torch.cat(back, -1)

        width = torch.Size([sum(room.numel() for room in rooms.values())])
        norm_CB = self._norms(by_rest, width, count, f"{word} by rest", eps_B)
        total_CB = total_CB + product(norm_CB, torch.stack(list(share.values())).sum(0).sqrt())
        return torch.where(unknown_B, torch.inf, total_CB)

    @cached_property
    def _drifts(self) -> Sizes:
        """How far the clean input of every leaf may be from the exact one, passed on by norms: it is rounding."""
        found, drift_B = Sizes(), torch.zeros_like(self._one)
        for leaves, step in zip(self.tape.of_nodes, self.inner.steps, strict=True):
            inside_B = drift_B
            for at in leaves:
                found[at] = inside_B
                inside_B = product(1 + self.tape.leaves[at].gain_B, inside_B)  # with and without a sum around it
            drift_B = product(step.norm_B, drift_B) + step.defect_B
        return found

    def _rounded(self, g: dict[int, Tensor]) -> Tensor:
        """What the defects of the clean points cost of margins with these gradients: (C, B)."""
        nodes = zip(self.tape.of_nodes, self.inner.steps, strict=True)
        costs = [product(g[leaves[-1]].flatten(2).norm(dim=-1), step.defect_B) for leaves, step in nodes]
        return torch.stack(costs).sum(0)

    @staticmethod
    def _applied(forms: dict[int, QuadraticForm], seen: dict[int, Tensor]) -> dict[int, Tensor]:
        return {at: form.apply(seen[at]) for at, form in forms.items() if at in seen}

    @cached_property
    def _lengths(self) -> dict[int, Lengths]:
        formed = {at: forms for at in self.tape.bent if (forms := self.tape.leaves[at].forms) is not None}
        count = sum(forms.squares(self._input(at)[None])[0].numel() for at, forms in formed.items()) * len(formed)
        share = least_square_sum(PROBES, PROBE_FAILURE / max(count, 1))
        by_image = self._reaches(formed, None, share)
        by_rest = {k: self._reaches(formed, k, share) for k in formed}
        found = {}
        for number, at in enumerate(self.tape.bent):
            whole = {at: QuadraticForm(lambda v: v, self.images.new_ones(()))}
            fronts = self.tape.bent[:number]
            norms = {k: self._between(k, at) for k in fronts}
            radius_B = self._seminorm(whole, self._one, {}, 1, f"input {at}")[0]
            if at not in formed:
                found[at] = Lengths(radius_B, norms, None, {})
                continue
            far = by_image[at]
            reach = {k: formed[at].sizes * _beside(norms[k], far) for k in fronts}
            reach |= {k: torch.minimum(by_rest[k][at], reach[k]) for k in fronts if k in formed}
            far = torch.minimum(far, formed[at].sizes * _beside(radius_B, far))
            found[at] = Lengths(radius_B, norms, far, reach)
        return found

    def _input(self, at: int) -> Tensor:
        """Of the shape of a leaf's input."""
        leaf = self.tape.leaves[at]
        return leaf.pull(leaf.y[None])[0]

    def _between(self, start: int, stop: int) -> Tensor:
        """||J_{k->i} B_k|| (B,)."""

        def gram(v: Tensor) -> Tensor:
            seen = self.tape.push(None, {start: v}, stop)
            return self.tape.collected(self.tape.pull(None, {stop: seen[stop]})[1], start)

        return self._norms(gram, self.tape.room(start), 1, f"{start} to {stop}", torch.zeros_like(self._one))[0]

    def _reaches(self, formed: dict[int, Forms], source: int | None, share: float) -> dict[int, Tensor]:
        """Lengths of the functionals of all leaves behind the source, seen from there. Of a Gaussian vector v of the
        source <a, J v> is normal with the variance |J^T a|^2, so that a sum of M squares falls short of `share`
        |J^T a|^2 by chance only (docs/proofs.md#probes)."""
        behind = [at for at in formed if source is None or at > source]
        if not behind:
            return {}
        room = self.images.shape[1:] if source is None else self.tape.room(source)
        few, squares = max(1, PROBE_BYTES // (32 * self.images.shape[0] * room.numel())), dict[int, Tensor]()
        start_BM = self._starts(torch.Size([PROBES, *room]), f"probes {source}", self._one)
        for probes in start_BM.movedim(1, 0).split(few):
            at_image, entering = (probes, {}) if source is None else (None, {source: probes})
            seen = self.tape.push(at_image, entering, max(behind))
            for at in behind:
                squares[at] = formed[at].squares(seen[at]) + squares.get(at, 0.0)
        return {at: (found / share).sqrt() for at, found in squares.items()}

    def _norms(
        self, gram: Callable[[Tensor], Tensor], room: torch.Size, count: int, word: str, eps_B: Tensor
    ) -> Tensor:
        """(C, B), C = `count`."""
        self._runs += count
        return lanczos.norms(gram, self._starts(room, word, eps_B), count)

    def _starts(self, room: torch.Size, word: str, eps_B: Tensor) -> Tensor:
        """(B, *room), of a stream of their own for every purpose and eps: what was found with one start chooses the
        maps that others measure, and the next eps of a search."""
        chosen_by = torch.cat([self.images.flatten(1), eps_B[:, None]], 1)
        return lanczos.starts(chosen_by, room, self._seed + word.encode())

    @property
    def _one(self) -> Tensor:
        return torch.ones_like(self.images[:, 0, 0, 0])


def _beside(size_B: Tensor, whole: Tensor) -> Tensor:
    """(B,) -> (B, 1, ...)."""
    return size_B.view(-1, *(1,) * (whole.ndim - 1))


def least_square_sum(count: int, chance: float) -> float:
    """x with P[chi^2 with `count` degrees of freedom <= x] <= chance: Chernoff, (t e^(1 - t))^(count / 2) for
    x = t count, t <= 1, which grows with t. Proof: docs/proofs.md#probes."""
    low, high = 0.0, 1.0
    for _ in range(100):
        t = (low + high) / 2
        if t > 0 and math.log(t) + 1 - t > 2 / count * math.log(chance):
            high = t
        else:
            low = t
    return low * count


class Image(Adjoint):
    """The certifier of one model, as `Adjoint` is. Raises NoRule likewise."""

    def expand(self, images_BCHW: Tensor, clean: Clean) -> ImageAnalysis:  # type: ignore[override]
        return ImageAnalysis(super().expand(images_BCHW, clean), images_BCHW, self._seed)
