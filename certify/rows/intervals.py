"""How far an accuracy of n images can be from that of all images of their kind; numbers and radii as papers write
them."""

import math

NAMES = {"l2": "L2", "linf": "Linf"}  # of norms, as people write them
Z = 1.959963984540054  # the 97.5 % point of the normal distribution: intervals of 95 %


def wilson(share: float, n: int) -> tuple[float, float]:
    """Wilson's 95 % interval (Wilson 1927) of a probability of which `share` was seen in n independent trials:

    ( p + z^2 / 2n -+ z sqrt( p (1 - p) / n + z^2 / 4 n^2 ) ) / ( 1 + z^2 / n ),      cut to [0, 1].

    Proof: docs/proofs.md#wilson.
    """
    spread = Z * math.sqrt(share * (1 - share) / n + Z**2 / (4 * n**2))
    low, high = ((share + Z**2 / (2 * n) + sign * spread) / (1 + Z**2 / n) for sign in (-1, 1))
    # It holds p: an end that is p itself, at 0 and 1, may be beyond it by rounding.
    return min(share, max(0.0, low)), max(share, min(1.0, high))


def percent(share: float) -> str:
    """0.125 -> '12.5'."""
    return f"{100 * share:.1f}"


def interval(share: float, n: int) -> str:
    """Wilson's, in percent: '72.3 to 81.0'."""
    low, high = wilson(share, n)
    return f"{percent(low)} to {percent(high)}"


def eps_words(eps: float | None) -> str:
    """0.0313725 -> '8/255'; 0.5 -> '0.5'; nothing for no radius. Six digits are enough to be known by."""
    if eps is None:
        return ""
    steps = eps * 255
    whole = eps > 0 and abs(steps - round(steps)) <= 5e-6 * steps
    return f"{round(steps)}/255" if whole else f"{eps:g}"


def eps_in(norm: str, eps: float) -> str:
    """An eps of certificates in this norm: '0.1' of L2, '8/255' of Linf where it is one."""
    return eps_words(eps) if norm == "linf" else f"{eps:g}"


def radius_in(norm: str, radius: float) -> str:
    """A measured radius: '0.1234' of L2, '1.234/255' of Linf."""
    return f"{255 * radius:.3f}/255" if norm == "linf" else f"{radius:.4f}"


def axis_of(norm: str) -> tuple[float, str]:
    """The unit of an axis of radii, as the number of it in 1, and its label."""
    if norm == "linf":
        return 255.0, "Linf radius eps in 1/255 of [0,1] pixel space"
    return 1.0, f"{NAMES[norm]} radius eps in [0,1] pixel space"


def at_most(chance: float) -> str:
    """A probability to one digit, never less than it is."""
    unit = 10.0 ** math.floor(math.log10(chance)) if chance > 0 else 1.0
    return f"{math.ceil(chance / unit * (1 - 1e-12)) * unit:.1g}"
