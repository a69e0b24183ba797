"""Selection of the cases that run in the gate (`make test`); the others are slow tests (`make test-slow`)."""

from collections.abc import Iterable
from typing import Any

import pytest


def mostly_slow(cases: Iterable[Any], *quick: Any) -> list[Any]:
    """Mark all cases as slow, except `quick`. A tuple holds one value for each argument."""
    every = list(cases)
    assert all(case in every for case in quick), f"not all of these are cases: {quick}"
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=() if case in quick else pytest.mark.slow)
        for case in every
    ]
