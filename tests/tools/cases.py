"""Which cases of a test run in the gate (`make test`), and which with the slow tests (`make test-slow`)."""

from collections.abc import Iterable
from typing import Any

import pytest


def mostly_slow(cases: Iterable[Any], *quick: Any) -> list[Any]:
    """The cases, slow but for `quick`. A tuple is one value for each argument."""
    every = list(cases)
    assert all(case in every for case in quick), f"not all of these are cases: {quick}"
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=() if case in quick else pytest.mark.slow)
        for case in every
    ]
