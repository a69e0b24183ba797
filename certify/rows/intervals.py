"""Confidence intervals of accuracies, and numbers and radii formatted as in papers."""

import math
from collections.abc import Mapping

import numpy as np

from certizoo.norms import LINF, NAMES

Z = 1.959963984540054  # the 97.5 % point of the normal distribution: intervals of 95 %


def wilson(share: float, n: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval (Wilson 1927) of a probability seen as `share` in n independent trials.

        ( p + z^2 / 2n -+ z sqrt( p (1 - p) / n + z^2 / 4 n^2 ) ) / ( 1 + z^2 / n ),      cut to [0, 1].

    Proof: docs/proofs.md#wilson.
    """
    spread = Z * math.sqrt(share * (1 - share) / n + Z**2 / (4 * n**2))
    low, high = ((share + Z**2 / (2 * n) + sign * spread) / (1 + Z**2 / n) for sign in (-1, 1))
    # The interval contains p, but at 0 and 1 rounding may put an end that equals p on its other side.
    return min(share, max(0.0, low)), max(share, min(1.0, high))


def percent(share: float) -> str:
    """Format a share: 0.125 -> '12.5'."""
    return f"{100 * share:.1f}"


def interval(share: float, n: int) -> str:
    """Format Wilson's interval in percent: '72.3 to 81.0'."""
    low, high = wilson(share, n)
    return f"{percent(low)} to {percent(high)}"


def eps_words(eps: float | None) -> str:
    """Format an eps: 0.0313725 -> '8/255'; 0.5 -> '0.5'; None -> ''. Six digits identify it."""
    if eps is None:
        return ""
    steps = eps * 255
    whole = eps > 0 and abs(steps - round(steps)) <= 5e-6 * steps
    return f"{round(steps)}/255" if whole else f"{eps:g}"


def eps_in(norm: str, eps: float) -> str:
    """Format an eps of certificates in this norm: '0.1' for L2, '8/255' for Linf if it is a multiple of 1/255."""
    return eps_words(eps) if norm == LINF else f"{eps:g}"


def radius_in(norm: str, radius: float) -> str:
    """Format a measured radius: '0.1234' for L2, '1.234/255' for Linf."""
    return f"{255 * radius:.3f}/255" if norm == LINF else f"{radius:.4f}"


def axis_of(norm: str) -> tuple[float, str]:
    """Return the factor from radii to the unit of their axis, and its label."""
    if norm == LINF:
        return 255.0, "Linf radius eps in 1/255 of [0,1] pixel space"
    return 1.0, f"{NAMES[norm]} radius eps in [0,1] pixel space"


def end_of_axis(radii: np.ndarray, survived: Mapping[float, float]) -> float:
    """Return where an axis of eps ends: beyond nearly all radii, and beyond the last eps that some image survives.

    `survived` is {eps: share under attack}. A grid for robust models would leave a weak one a corner of its chart.
    """
    alive = [eps for eps, share in survived.items() if share > 0]
    return 1.25 * max(min(survived), float(np.quantile(radii, 0.95)), *alive)


def at_most(chance: float) -> str:
    """Format a probability with one digit, rounded up."""
    unit = 10.0 ** math.floor(math.log10(chance)) if chance > 0 else 1.0
    return f"{math.ceil(chance / unit * (1 - 1e-12)) * unit:.1g}"
