"""Intervals of shares."""

import numpy as np
import pytest
from scipy.stats import binomtest  # type: ignore[import-untyped]

from certify.rows.intervals import end_of_axis, wilson


def test_the_interval_holds_the_share_and_is_wilsons() -> None:
    """At 0 and 1 one end is the share itself, which rounding must not exclude."""
    for n in (1, 12, 97, 300):
        for k in range(n + 1):
            low, high = wilson(k / n, n)
            assert 0 <= low <= k / n <= high <= 1
            known = binomtest(k, n).proportion_ci(0.95, "wilson")
            assert (low, high) == pytest.approx((known.low, known.high), abs=1e-6)


def test_an_axis_ends_where_nothing_survives() -> None:
    radii = np.linspace(-1.0, 0.2, 21)
    assert end_of_axis(radii, {0.05: 0.5, 0.1: 0.1, 5.0: 0.0}) == pytest.approx(1.25 * 0.14)
    assert end_of_axis(radii, {0.05: 0.5, 5.0: 0.1}) == 1.25 * 5
    assert end_of_axis(-np.ones(5), {0.3: 0.0, 5.0: 0.0}) == 1.25 * 0.3
