"""The pictures of docs/explained/methods.md are true: no proved radius or margin is too large."""

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from certify import certified_radius

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pictures() -> ModuleType:
    """Import the module here: it registers a type that tests of all types would otherwise find."""
    from docs import pictures

    return pictures


@pytest.fixture(scope="module")
def scene(pictures: ModuleType) -> Any:
    return pictures.scene()


@pytest.mark.parametrize("method", ["lofast", "adjoint", "image"])
def test_proved_radii_end_before_the_nearest_other_class(method: str, pictures: ModuleType, scene: Any) -> None:
    radii = certified_radius(scene.model, scene.chosen, scene.answers, method=method)
    for i, point in enumerate(scene.chosen.view(-1, 2)):
        assert 0 < radii[i] <= pictures.true_radius(scene.model, point, int(scene.answers[i]))


def test_proved_margins_are_below_the_least_of_the_ball(pictures: ModuleType, scene: Any) -> None:
    point, label = scene.chosen[3:], int(scene.answers[3])
    radii = np.linspace(0.01, 0.13, 5)
    least = [float(pictures.margins(scene.model, pictures.disc(point, float(eps)), label).min()) for eps in radii]
    for method in ("lofast", "adjoint", "image"):
        assert (np.array(pictures.bounds(scene, point, label, radii, method)) <= least).all(), method


def test_all_of_them_are_drawn(pictures: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "FOLDER", tmp_path)
    threads = torch.get_num_threads()
    pictures.main()
    torch.set_num_threads(threads)
    committed = {path.name for path in (Path(str(pictures.__file__)).parent / "pictures").glob("*.svg")}
    assert {path.name for path in tmp_path.iterdir()} == committed
