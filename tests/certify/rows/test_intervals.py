"""Intervals of shares."""

import pytest
from scipy.stats import binomtest  # type: ignore[import-untyped]

from certify.rows.intervals import wilson


def test_the_interval_holds_the_share_and_is_wilsons() -> None:
    """At 0 and 1 one end is the share itself, which rounding must not exclude."""
    for n in (1, 12, 97, 300):
        for k in range(n + 1):
            low, high = wilson(k / n, n)
            assert 0 <= low <= k / n <= high <= 1
            known = binomtest(k, n).proportion_ci(0.95, "wilson")
            assert (low, high) == pytest.approx((known.low, known.high), abs=1e-6)
