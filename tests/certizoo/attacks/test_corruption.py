"""Common corruptions draw per image, grow with severity, and name the package that they need."""

import pytest
import torch
from torch import Generator, Tensor

from certizoo import UserError
from certizoo.attacks import make
from certizoo.attacks.corruption import COMMON, SEEDED, Corruption
from certizoo.attacks.norms import distance
from tests.tools.attacked import mlp


@pytest.mark.parametrize("name", COMMON)
@pytest.mark.parametrize("channels", [1, 3])
def test_every_corruption_draws_by_image_and_gets_worse(name: str, channels: int) -> None:
    library = pytest.importorskip("imagecorruptions", reason="the extra `corruptions` is not installed")
    assert tuple(library.get_corruption_names()) == COMMON
    smooth = torch.linspace(0.2, 0.8, 32).expand(2, channels, 32, 32).clone()
    labels = torch.zeros(2, dtype=torch.int64)

    def corrupted(severity: int, seed: int, rows: slice = slice(None)) -> Tensor:
        draws = [Generator().manual_seed(seed + i) for i in range(2)][rows]
        return Corruption(name, severity).run(mlp(), smooth[rows], labels[rows], draws)

    mild, hard = corrupted(1, 0), corrupted(5, 0)
    assert torch.equal(hard, corrupted(5, 0))
    assert torch.equal(hard[1:], corrupted(5, 0, slice(1, 2)))
    assert distance(hard, smooth, "l2").mean() >= distance(mild, smooth, "l2").mean() > 0
    assert set(SEEDED) < set(COMMON)


def test_corruptions_refuse_in_words() -> None:
    with pytest.raises(UserError, match="no corruption 'rain'; nearest: "):
        make({"kind": "corruption", "name": "rain"})
    with pytest.raises(UserError, match="severity=6"):
        make({"kind": "corruption", "name": "fog", "severity": 6})
    with pytest.raises(UserError, match=r"corruption\.name is missing"):
        make({"kind": "corruption"})


def test_a_missing_library_of_corruptions_is_one_line_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("certizoo.attacks.corruption.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'certizoo\[corruptions\]'"):
        Corruption("fog")


def test_small_images_are_not_corrupted() -> None:
    pytest.importorskip("imagecorruptions", reason="the extra `corruptions` is not installed")
    with pytest.raises(UserError, match="32 pixels a side or more, but these have 28x28"):
        Corruption("fog").run(mlp(), torch.rand(1, 1, 28, 28), torch.zeros(1, dtype=torch.int64))
