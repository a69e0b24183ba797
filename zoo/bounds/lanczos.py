"""Lanczos' method: eigenvalue estimates from below (`ritz`) and norms from above (`norms`) of implicit linear maps.

An upper bound fails with a stated probability.

k steps from a unit vector v give a tridiagonal matrix with eigenvalues theta_i (the Ritz values) and couplings
b_1 .. b_k. With M = A^T A the polynomial p(x) = prod_i (x - theta_i) then has |p(M) v| = b_1 ... b_k (Parlett 1998,
section 12.3), and so, u being the eigenvector of lambda = lambda_max(M),

    p(lambda) |<u, v>|  <=  b_1 ... b_k.

For v uniform on the sphere of R^n the density of <u, v> is at most sqrt(n / 2 pi). So

    P[ |<u, v>| < s ]  <=  s sqrt(2 n / pi)  =  chance(n),

and except with that probability ||A||^2 = lambda is at most the x > max theta_i where b_1 ... b_k / p(x) = s, because p
grows beyond max theta_i. (The bound of Kuczynski and Wozniakowski 1992 holds for the worst spectrum, this one for the
spectrum at hand.) The start comes from a stream chosen by a nonce, the weights and the image, so neither the batch nor
the number of processes changes a certificate by more than rounding. The probability is over the nonce: it holds for
weights and images that were fixed before the nonce was drawn.

The bound holds for all k with the same <u, v>. The recurrence therefore continues until the bound is close, and the
probability of failure stays that of one start. A norm is the larger bound of STARTS independent starts, so it fails
only if all of them do.

Rounding, including that of the products with M, leaves an F in the recurrence, M V = V T + b_k v_{k+1} u_k^T + F, with
|u^T F| <= ROUNDING lambda. So

    |<u, v>|  <=  b_1 ... b_k / p(lambda)  +  ROUNDING lambda |(lambda - T)^{-1} u_1|,

where u_1 is the first unit vector. x is where the right side falls to s. It keeps its distance from max theta_i, where
the right side is infinite. The caller of `norms` states how far its products are from exact ones; since a start may
fail with probability 1 / 30,000, this may be a hundred million times the rounding of one operation.
"""

import hashlib
import math
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

STARTS = 2  # of every norm
STEPS = (8, 10, 12, 14, 16, 18, 20, 24, 28, 32, 36, 42, 48)  # after these the bound is evaluated
EARLY, ROUGH = 6, 1.5  # and after 6 if a bound 1.5 times too large will do
CLOSE = 1.02  # a bound this much above the Ritz value, which is a lower bound, will do
FAILURE = 1e-9  # probability that one norm is too small, rounding included; for huge maps see `chance`
NUDGE = 1e-14
MEASURED = 1e-15  # rounding of the measured recurrence, in units of the image of a vector
SMALLEST = 1e-120  # added to every eigenvalue; underflow in a product is negligible beside it
HUGE = 1e100  # entries above this make the norm infinite
ROUNDING = 5e-8  # largest |u^T F| / lambda; beyond it the norm is infinite
SEEN = 4  # least s, in units of ROUNDING
SLACK = 1 + 1e-9
HALVINGS = 50  # the interval is less than 100 times as long as its lower end
Map = Callable[[Tensor], Tensor]


def new_nonce() -> str:
    """Return a fresh random nonce. Its first letter keeps YAML from reading a number."""
    return f"n{secrets.token_hex(16)}"


def seed_of(model: nn.Module, nonce: str) -> bytes:
    """Return a hash of the nonce and of every number in the model."""
    digest = hashlib.sha256(nonce.encode())
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(_bytes(tensor))
    return digest.digest()


def starts(images_BCHW: Tensor, shape: torch.Size, seed: bytes) -> Tensor:
    """Return one Gaussian vector (B, *shape) an image, from a stream that `seed` and the pixels choose.

    On a GPU the stream is one of the GPU's, because drawing on the host and copying would take most of the time. There
    are at least 2^124 streams. With few, such as the 2^32 of torch on a host, one direction can be orthogonal to a
    share of all vectors that can be drawn.
    """
    keys = [hashlib.sha256(seed + _bytes(image_CHW)).digest() for image_CHW in images_BCHW.double().cpu()]
    drawn = images_BCHW.new_empty((len(keys), *shape), dtype=torch.float64)
    for key, room in zip(keys, drawn, strict=True):
        (_draw_on_gpu if drawn.is_cuda else _draw_on_host)(key, room)
    return drawn


def _draw_on_host(key: bytes, room: Tensor) -> None:
    stream = np.random.Generator(np.random.SFC64(int.from_bytes(key[:16], "big")))
    stream.standard_normal(out=room.numpy())


def _draw_on_gpu(key: bytes, room: Tensor) -> None:
    """Draw from Philox; its state is 64 bits of seed and an offset, a multiple of 4 that must not overflow."""
    offset = int.from_bytes(key[8:16], sys.byteorder) >> 4 << 2
    state = bytearray(key[:8] + offset.to_bytes(8, sys.byteorder))
    stream = torch.Generator(room.device)
    stream.set_state(torch.frombuffer(state, dtype=torch.uint8))
    room.normal_(generator=stream)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().numpy().tobytes()


@dataclass(frozen=True)
class Ritz:
    """The spectrum after k steps.

    theta: the eigenvalues of T, ascending; first: the first entries of its eigenvectors; b: the couplings; off: the
    Frobenius norm of the recurrence's error; most: the largest length of an image of a vector.
    """

    theta_LK: Tensor
    first_LK: Tensor
    b_LK: Tensor
    off_L: Tensor
    most_L: Tensor


def tridiagonal(apply: Map, start_LN: Tensor, counts: Sequence[int]) -> Iterator[Ritz]:
    """Yield the spectrum after each of these numbers of steps of a symmetric map (L, n) -> (L, n).

    The image of a vector is made orthogonal to that vector and the one before, which suffices in exact arithmetic, and
    then, as a unit vector, to the whole basis. A map that is not symmetric and linear shows in `off`.
    """
    diagonal, b, off2_L = list[Tensor](), list[Tensor](), torch.zeros_like(start_LN[:, 0])
    most_L = torch.zeros_like(off2_L)
    v_LN = start_LN / _length(start_LN)
    basis_LKN = start_LN.new_empty(len(start_LN), 0, start_LN.shape[-1])
    for count in counts:
        basis_LKN = pad(basis_LKN, (0, 0, 0, count - len(b)))  # grown on demand: few maps need all counts
        for k in range(len(b), count):
            basis_LKN[:, k] = v_LN
            so_far = basis_LKN[:, : k + 1]
            image_LN = apply(v_LN)
            most_L = torch.maximum(most_L, _length(image_LN).squeeze(-1))
            diagonal.append((image_LN * v_LN).sum(-1))
            # In an exhausted space only rounding is left, in no free direction: add a little of one.
            free_LN = NUDGE * _length(image_LN) / _length(start_LN) * start_LN.roll(k + 1, -1)
            rest_LN = _without(so_far[:, -2:], image_LN + free_LN)
            b.append(torch.linalg.vector_norm(rest_LN, dim=-1))
            v_LN = _orthonormal(so_far, rest_LN)
            off_LN = image_LN - diagonal[k][:, None] * so_far[:, k] - b[k][:, None] * v_LN
            off_LN = off_LN - b[k - 1][:, None] * so_far[:, k - 1] if k else off_LN
            off2_L = off2_L + (_length(off_LN) + MEASURED * _length(image_LN)).square().squeeze(-1)
        diagonal_LK, b_LK = torch.stack(diagonal, -1), torch.stack(b, -1)
        whole = torch.diag_embed(diagonal_LK)
        for offset in (1, -1):
            whole = whole + torch.diag_embed(b_LK[:, :-1], offset)
        theta_LK, vectors_LKK = torch.linalg.eigh(whole)
        yield Ritz(theta_LK, vectors_LKK[:, 0], b_LK, off2_L.sqrt(), most_L)


def _length(v: Tensor) -> Tensor:
    """Return |v| (..., 1), never 0."""
    return torch.linalg.vector_norm(v, dim=-1, keepdim=True).clamp_min(1e-300)


def _orthonormal(basis_LKN: Tensor, v_LN: Tensor) -> Tensor:
    """Return v as a unit vector orthogonal to the basis; repeat where most of it was lost (Daniel et al. 1976)."""
    rest_LN = _without(basis_LKN, v_LN / _length(v_LN))
    if bool((lost_L1 := _length(rest_LN) < 0.5).any()):
        rest_LN = torch.where(lost_L1, _without(basis_LKN, rest_LN / _length(rest_LN)), rest_LN)
    return rest_LN / _length(rest_LN)


def _without(basis_LKN: Tensor, v_LN: Tensor) -> Tensor:
    """Return v minus its part in the span of an orthonormal basis."""
    return v_LN - ((basis_LKN @ v_LN.unsqueeze(-1)).mT @ basis_LKN).squeeze(1)


def ritz(apply: Map, start_LN: Tensor, count: int) -> Tensor:
    """Return the largest Ritz value (L,), never above lambda_max; infinite where the map overflows."""
    lost_L = torch.zeros_like(start_LN[:, 0], dtype=torch.bool)
    found_L = next(tridiagonal(_within_numbers(apply, lost_L), start_LN, (count,))).theta_LK[:, -1]
    return torch.where(lost_L, torch.inf, found_L)


def _within_numbers(apply: Map, lost_L: Tensor) -> Map:
    """Replace images that are NaN or too large to be squared by the vector itself, and set `lost_L` there."""

    def within(v_LN: Tensor) -> Tensor:
        image_LN = apply(v_LN)
        lost_L.logical_or_(~(image_LN.abs().amax(-1) < HUGE))
        return torch.where(lost_L[:, None], v_LN, image_LN)

    return within


def chance(n: int) -> float:
    """Return the probability that one norm of a map on R^n is too small."""
    return _chance_of_start(n) ** STARTS


def _chance_of_start(n: int) -> float:
    """Return the probability that one start fails; STARTS of them fail together with probability FAILURE.

    It is larger where n is so large that s would be near ROUNDING, and rounding could hide a direction.
    """
    return max(FAILURE ** (1 / STARTS), SEEN * ROUNDING * math.sqrt(2 * n / math.pi))


def upper(found: Ritz, n: int) -> Tensor:
    """Bound lambda_max (L,) of a map on R^n by bisection, except with the probability of one start."""
    s = _chance_of_start(n) / math.sqrt(2 * n / math.pi)
    product_L, low_L = found.b_LK.log().sum(-1), found.theta_LK[:, -1]
    # At the upper end each of the two terms is at most s / 2: p(x) >= (x - max theta)^k.
    far_L = ((product_L - math.log(s / 2)) / found.theta_LK.shape[-1]).exp()
    high_L = torch.maximum(low_L + far_L, low_L / (1 - 2 * ROUNDING / s))
    for _ in range(HALVINGS):
        middle_L = (low_L + high_L) / 2
        gap_LK = middle_L[:, None] - found.theta_LK
        apart_LK = middle_L[:, None] - found.theta_LK.clamp_min(0)  # below 0 the term would not fall with x
        rounding_L = ROUNDING * middle_L * torch.linalg.vector_norm(found.first_LK / apart_LK, dim=-1)
        enough_L = (product_L - gap_LK.log().sum(-1)).exp() + rounding_L <= s
        low_L, high_L = torch.where(enough_L, low_L, middle_L), torch.where(enough_L, middle_L, high_L)
    return high_L


def norms(gram: Map, start: Tensor, rounding: Tensor, close: float = CLOSE) -> Tensor:
    """Return upper bounds (S, B) of ||A|| for S maps and B images.

    Args:
        gram: v (S STARTS, B, ...) -> A^T A v, with the STARTS vectors of one map next to each other.
        start: (S, STARTS, B, ...); several maps may share one.
        rounding: (S, B), never below |u^T (fl(A^T A v) - A^T A v)| / ||A||^2 for the unit vectors v that occur.
        close: see CLOSE.

    A bound is infinite where a map overflows or its rounding is beyond ROUNDING. Proof: docs/proofs.md#lanczos.
    """
    maps, count, images = start.shape[:3]

    def apply(v_LN: Tensor) -> Tensor:
        image_LN = gram(v_LN.view(maps * count, images, *start.shape[3:])).flatten(2).flatten(0, 1)
        return image_LN + SMALLEST * v_LN

    n = start[0, 0, 0].numel()
    found_L = start.new_full((maps * count * images,), torch.inf)  # an image's result does not depend on the others
    lost_L, off_L = torch.zeros_like(found_L, dtype=torch.bool), torch.zeros_like(found_L)
    most_L, within = torch.zeros_like(found_L), _within_numbers(apply, lost_L)
    steps = STEPS if close < ROUGH else (EARLY, *STEPS)
    for spectrum in tridiagonal(within, start.flatten(3).flatten(0, 2), sorted({min(n, k) for k in steps})):
        enough_L = close**2 * spectrum.theta_LK[:, -1]
        open_L = ~(found_L <= enough_L)
        found_L = torch.where(open_L, upper(spectrum, n), found_L)
        off_L = torch.where(open_L, spectrum.off_L / spectrum.theta_LK[:, -1], off_L)
        most_L = torch.where(open_L, spectrum.most_L, most_L)
        if bool((found_L <= enough_L).all()):
            break
    found_L = torch.where(lost_L | (most_L > 2 * found_L), torch.inf, found_L)
    found_SB = (found_L.clamp_min(0).sqrt() * SLACK).view(maps, count, images).amax(1)
    off_SB = rounding + off_L.view(maps, count, images).amax(1)
    return torch.where(off_SB <= ROUNDING, found_SB, torch.inf)
