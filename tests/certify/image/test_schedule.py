"""The search over e finds the largest useful one, below the point where the maps diverge, from any start."""

import pytest
import torch
from torch import Tensor

from certify.api import radius_of
from certify.ellipsoids.budget import GAIN
from certify.image import image
from certify.image.schedule import RadiusSchedule
from tests.tools.image_stages import analysis_of

LEAST = GAIN[1]


def proved(first_B: Tensor, end_B: Tensor, short: float, far: float) -> Tensor:
    """Return the radius proved by stages from `first` on.

    Each proves everything up to `end`, and beyond it a share of `end`. Below it, it says that its bounds reach `far`
    times as far beyond the largest e as `end` is, in the logarithm.
    """
    schedule, best_B = RadiusSchedule.first(first_B, torch.full_like(first_B, 10.0)), torch.zeros_like(first_B)
    for _ in range(image.MAX_STAGES):
        most_B = schedule.most_B
        found = schedule.after(torch.where(most_B > end_B, short * end_B, most_B * (end_B / most_B) ** far))
        best_B, schedule = torch.fmax(best_B, found.proved_B), found.worth(LEAST)
    return best_B


@pytest.mark.parametrize("far", [1.0, 1.3, 1.8])
@pytest.mark.parametrize("short", [0.0, 0.5, 0.9])
def test_the_end_is_found_from_wherever_a_search_begins(short: float, far: float) -> None:
    """Start from twice the end and from two thirds of it."""
    first_B = torch.linspace(0.66, 2.0, 100, dtype=torch.float64)
    found_B = proved(first_B, torch.ones_like(first_B), short, far)
    assert (found_B <= 1).all()
    assert (found_B >= LEAST**-2).all()


def test_the_first_order_ends_a_search() -> None:
    """The first-order radius is an upper limit, and no stage below it reaches further."""
    e_B = torch.tensor([1.0, 0.8], dtype=torch.float64)
    after = RadiusSchedule.first(e_B, torch.ones_like(e_B)).after(1.3 * e_B).worth(LEAST)
    assert after.most_B[0].isnan()
    assert 0.8 < after.most_B[1] < 1
    assert after.may_decide(0.95 * e_B / e_B).tolist() == [False, True]
    assert not after.may_decide(1.01 * e_B / e_B).any()


def test_a_search_goes_on_beyond_what_others_prove() -> None:
    """The search skips radii that the adjoint analysis proves, even after a stage that fell short."""
    e_B = torch.tensor([1.0, 1.0, 0.0, torch.nan], dtype=torch.float64)
    fell = RadiusSchedule.first(e_B, torch.full_like(e_B, 10.0)).after(0.0 * e_B)
    for schedule in (RadiusSchedule.first(e_B, torch.full_like(e_B, 10.0)), fell):
        found = schedule.skip_proved(lambda e_B: e_B < torch.tensor([0.8, 0.0, 1.0, 1.0]), LEAST)
        assert found.most_B[0] > 0.8
        assert found.most_B[1] == schedule.most_B[1]
        assert found.most_B[2:].isnan().all()


@pytest.mark.slow
@pytest.mark.parametrize("parts", ["standard", "stem"])
def test_radii_hang_little_on_what_was_expected(parts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first stage may be too small or far too large. The divergence point also depends on random starts."""
    found = []
    for beyond in (0.8, image.FIRST_STAGE, 2.5):
        monkeypatch.setattr(image, "FIRST_STAGE", beyond)
        _, analysis = analysis_of(parts, 1, count=6)
        found.append(radius_of(analysis))
    low_B, high_B = torch.stack(found).aminmax(dim=0)
    assert (low_B > 0.75 * high_B).all()
    assert (low_B / high_B).mean() > 0.9
