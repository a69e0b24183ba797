"""Penalties on weights survive bf16 over the range of the searches."""

from pathlib import Path

import pytest

from tests.tools.zero_runs import differences, whole

pytestmark = pytest.mark.slow


def test_every_penalty_reaches_the_weights_in_bf16(folder: Path) -> None:
    """MSVP from 1e-6 to 1e-2 and the hinge, at each stage, with accumulation and the average of the weights."""
    found = differences(folder, "arrival")
    assert len(found) == 4 * 6
    for arrived in found.values():
        whole(arrived)
