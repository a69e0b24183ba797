"""Largest eigenvalues by Lanczos' method: estimates from below (`ritz`), and norms of linear maps that are never
written out, from above with a stated chance to fail (`norms`).

k steps from a unit vector v give a tridiagonal matrix with eigenvalues theta_i (the Ritz values) and couplings
b_1 .. b_k. With M = A^T A the polynomial p(x) = prod_i (x - theta_i) then has |p(M) v| = b_1 ... b_k (Parlett 1998,
section 12.3), and so, u being the eigenvector of lambda = lambda_max(M),

    p(lambda) |<u, v>|  <=  b_1 ... b_k.

For v uniform on the sphere of R^n the density of <u, v> is at most sqrt(n / 2 pi), whence

    P[ |<u, v>| < s ]  <=  s sqrt(2 n / pi)  =  chance(n),

and but for that chance ||A||^2 = lambda is at most the x > max theta_i where b_1 ... b_k / p(x) = s: p grows beyond
max theta_i. (The bound of Kuczynski and Wozniakowski 1992 is for the worst spectrum, this one for that which was met.)
The start is drawn from a stream that is chosen by a nonce, the weights and the image, so neither the batch nor the
number of processes changes a certificate by more than rounding. The chance is over the nonce: it holds against whoever
fixed the weights and the images before the nonce was drawn, and not against who knew it.

The bound holds for all k with the same <u, v>: the recurrence goes on, vector by vector, until it is close, and the
chance to fail is that of one start all the same. A norm is the larger bound of STARTS independent starts: it fails
where all of them do.

Rounding, that of the products with M included, leaves an F in the recurrence, M V = V T + b_k v_{k+1} u_k^T + F, with
|u^T F| <= ROUNDING lambda, whence

    |<u, v>|  <=  b_1 ... b_k / p(lambda)  +  ROUNDING lambda |(lambda - T)^{-1} u_1|,

u_1 the first unit vector. x is where that falls to s: it keeps its distance from max theta_i, in which the right side
is infinite, and `chance` is that with rounding. Who asks for a norm says how far the products are from exact ones; for
a start with one chance in 30,000 that may be a hundred million times more than one operation rounds.
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

STARTS = 2  # of every norm
STEPS = (8, 10, 12, 14, 16, 18, 20, 24, 28, 32, 36, 42, 48)  # where the bound is looked at
EARLY, ROUGH = 6, 1.5  # and a first time where so much may be missing
CLOSE = 1.02  # and is good enough, as a multiple of what is a bound from below
FAILURE = 1e-9  # the chance that one norm is too small, rounding included; of huge maps see `chance`
NUDGE = 1e-14
MEASURED = 1e-15  # what measuring the recurrence rounds, in units of the image of a vector
SMALLEST = 1e-120  # added to every eigenvalue: what underflows in a product is nothing beside it
HUGE = 1e100  # of an entry of an image: beyond it a map is taken for an infinite one
ROUNDING = 5e-8  # |u^T F| / lambda of the recurrence with rounding: with more, nothing is known
SEEN = 4  # the least share of a start in a direction that is asked about, in units of ROUNDING
SLACK = 1 + 1e-9
HALVINGS = 50  # of an interval less than 100 times as long as its lower end
Map = Callable[[Tensor], Tensor]


def new_nonce() -> str:
    """What nobody knew before. The letter in front keeps YAML from reading a number."""
    return f"n{secrets.token_hex(16)}"


def seed_of(model: nn.Module, nonce: str) -> bytes:
    """Of a nonce, and of every number in the model."""
    digest = hashlib.sha256(nonce.encode())
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(_bytes(tensor))
    return digest.digest()


def starts(images_BCHW: Tensor, shape: torch.Size, seed: bytes) -> Tensor:
    """One Gaussian vector (B, *shape) an image, drawn from a stream of its own that `seed` and its pixels choose: on a
    GPU from one of the GPU's, as drawing and copying would take a host most of a certificate's time there.

    There are 2^124 streams or more: of a generator with few, such as torch's on a host with its 2^32, one direction can
    be orthogonal to a share of all vectors that it can draw.
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
    """Philox, whose state is 64 bits of seed, and an offset in fours that must not overflow."""
    offset = int.from_bytes(key[8:16], sys.byteorder) >> 4 << 2
    state = bytearray(key[:8] + offset.to_bytes(8, sys.byteorder))
    stream = torch.Generator(room.device)
    stream.set_state(torch.frombuffer(state, dtype=torch.uint8))
    room.normal_(generator=stream)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().numpy().tobytes()


@dataclass(frozen=True)
class Ritz:
    """After k steps: the eigenvalues of T, ascending, the first entries of its eigenvectors, the couplings b, and how
    far the recurrence is from what the map gave, in the Frobenius norm; the longest image of a vector."""

    theta_LK: Tensor
    first_LK: Tensor
    b_LK: Tensor
    off_L: Tensor
    most_L: Tensor


def tridiagonal(apply: Map, start_LN: Tensor, counts: Sequence[int]) -> Iterator[Ritz]:
    """Yield the spectrum after each of these numbers of steps of a symmetric map (L, n) -> (L, n).

    Only the last two vectors are kept. The bound needs the recurrence and no orthogonal basis: what rounding takes from
    the basis repeats eigenvalues that are found already, and costs a step or two.
    """
    diagonal, b, off2_L = list[Tensor](), list[Tensor](), torch.zeros_like(start_LN[:, 0])
    most_L = torch.zeros_like(off2_L)
    v_LN, before_LN, b_before_L1 = start_LN / _length(start_LN), torch.zeros_like(start_LN), torch.zeros_like(off2_L)[:, None]
    for count in counts:
        for _ in range(len(b), count):
            image_LN = apply(v_LN)
            size_L1 = _length(image_LN)
            most_L = torch.maximum(most_L, size_L1.squeeze(-1))
            a_L1 = (image_LN * v_LN).sum(-1, keepdim=True)
            # In an exhausted space only rounding is left, in no free direction: add a little of one.
            free_LN = NUDGE * size_L1 / _length(start_LN) * start_LN.roll(len(b) + 1, -1)
            rest_LN = image_LN - a_L1 * v_LN - b_before_L1 * before_LN
            b_L1 = _length(next_LN := rest_LN + free_LN)
            next_LN = next_LN / b_L1
            off_L1 = _length(rest_LN - b_L1 * next_LN) + MEASURED * size_L1
            off2_L = off2_L + off_L1.square().squeeze(-1)
            diagonal.append(a_L1.squeeze(-1))
            b.append(b_L1.squeeze(-1))
            before_LN, v_LN, b_before_L1 = v_LN, next_LN, b_L1
        diagonal_LK, b_LK = torch.stack(diagonal, -1), torch.stack(b, -1)
        whole = torch.diag_embed(diagonal_LK)
        for offset in (1, -1):
            whole = whole + torch.diag_embed(b_LK[:, :-1], offset)
        theta_LK, vectors_LKK = torch.linalg.eigh(whole)
        yield Ritz(theta_LK, vectors_LKK[:, 0], b_LK, off2_L.sqrt(), most_L)


def _length(v: Tensor) -> Tensor:
    """Return |v| (..., 1), never 0."""
    return torch.linalg.vector_norm(v, dim=-1, keepdim=True).clamp_min(1e-300)


def ritz(apply: Map, start_LN: Tensor, count: int) -> Tensor:
    """The largest Ritz value (L,): never above lambda_max. Infinite where the map is not within the numbers."""
    lost_L = torch.zeros_like(start_LN[:, 0], dtype=torch.bool)
    found_L = next(tridiagonal(_within_numbers(apply, lost_L), start_LN, (count,))).theta_LK[:, -1]
    return torch.where(lost_L, torch.inf, found_L)


def _within_numbers(apply: Map, lost_L: Tensor) -> Map:
    """The map, and the identity where its image is too large to be squared, or is no number: `lost_L` is set there."""

    def within(v_LN: Tensor) -> Tensor:
        image_LN = apply(v_LN)
        lost_L.logical_or_(~(image_LN.abs().amax(-1) < HUGE))
        return torch.where(lost_L[:, None], v_LN, image_LN)

    return within


def chance(n: int) -> float:
    """That one norm of a map on R^n is too small."""
    return _chance_of_start(n) ** STARTS


def _chance_of_start(n: int) -> float:
    """So that STARTS of them fail together with FAILURE; and more where n is so large that s would be near ROUNDING,
    and rounding could hide a direction."""
    return max(FAILURE ** (1 / STARTS), SEEN * ROUNDING * math.sqrt(2 * n / math.pi))


def upper(found: Ritz, n: int) -> Tensor:
    """lambda_max <= (L,) but for the chance of one start, of a map on R^n, by bisection."""
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
    """Upper bounds (S, B) of ||A|| of S maps for each of B images, gram: v (S STARTS, B, ...) -> A^T A v, the STARTS
    vectors of one map behind each other, from starts (S, STARTS, B, ...); of several maps they may be one. `rounding`
    (S, B): never below |u^T (fl(A^T A v) - A^T A v)| / ||A||^2 for the unit vectors v that are met, u as above.
    `close`: see CLOSE. Infinite where a map is not within the numbers, or its rounding beyond ROUNDING.

    Proof: docs/proofs.md#lanczos.
    """
    maps, count, images = start.shape[:3]

    def apply(v_LN: Tensor) -> Tensor:
        image_LN = gram(v_LN.view(maps * count, images, *start.shape[3:])).flatten(2).flatten(0, 1)
        return image_LN + SMALLEST * v_LN

    n = start[0, 0, 0].numel()
    found_L = start.new_full((maps * count * images,), torch.inf)  # an image's own, whatever others need
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
