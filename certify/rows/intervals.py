"""How far an accuracy of n images can be from that of all images of their kind; numbers as papers write them."""

import math

Z = 1.959963984540054  # the 97.5 % point of the normal distribution: intervals of 95 %


def wilson(share: float, n: int) -> tuple[float, float]:
    """Wilson's 95 % interval (Wilson 1927) of a probability of which `share` was seen in n independent trials:

    ( p + z^2 / 2n -+ z sqrt( p (1 - p) / n + z^2 / 4 n^2 ) ) / ( 1 + z^2 / n ),      cut to [0, 1].

    Proof: docs/proofs.md#wilson.
    """
    spread = Z * math.sqrt(share * (1 - share) / n + Z**2 / (4 * n**2))
    low, high = ((share + Z**2 / (2 * n) + sign * spread) / (1 + Z**2 / n) for sign in (-1, 1))
    return max(0.0, low), min(1.0, high)


def percent(share: float) -> str:
    """0.125 -> '12.5'."""
    return f"{100 * share:.1f}"


def interval(share: float, n: int) -> str:
    """Wilson's, in percent: '72.3 to 81.0'."""
    low, high = wilson(share, n)
    return f"{percent(low)} to {percent(high)}"


def eps_words(eps: float | None) -> str:
    """0.0313725 -> '8/255'; 0.5 -> '0.5'; nothing for no radius."""
    if eps is None:
        return ""
    steps = eps * 255
    return f"{round(steps)}/255" if eps > 0 and abs(steps - round(steps)) < 1e-6 else f"{eps:g}"
