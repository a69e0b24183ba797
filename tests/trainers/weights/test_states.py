"""A checkpoint's tensors: bit for bit at every ZeRO stage, for any number of ranks."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.tools.checkpoints import whole
from tests.tools.launching import ROOT, TINY, run_ranks
from tests.tools.teachers import save_teacher
from tests.tools.workers.resume import CHOICES, HALF
from trainers.job import checkpoint

WORKER = ROOT / "tests" / "tools" / "workers" / "resume.py"
CAPS = (
    "+model.attention={name:dp,v_cap:1.0,o_cap:1.0}"  # adds vectors of power iterations, buffers that training changes
)
MOMENTA = {"sgd": (True, False), "muon": (True, True)}  # (one momentum for each parameter, AdamW's two)
CASES = [
    pytest.param(which, name, marks=() if which == "quick" else pytest.mark.slow)
    for which, names in CHOICES.items()
    for name in names
]


@dataclass(frozen=True)
class Found:
    """The findings of a worker and the folder of its runs."""

    facts: dict[str, dict[str, float]]
    runs: Path


@pytest.fixture(scope="module")
def launched(folder: Path) -> Callable[[str], Found]:
    @cache
    def of(which: str) -> Found:
        small = [override for override in TINY if not override.startswith("train.batch_size")]
        out = folder / f"{which}.json"
        save_teacher(folder / "teacher")
        command = (*small, CAPS, "train.batch_size=16", f"name={which}", which, str(out))
        run_ranks(WORKER, *command, cwd=folder)
        facts = dict(json.loads(out.read_text()))
        assert set(facts) == set(CHOICES[which])
        return Found(facts, folder / "runs" / which)

    return of


@pytest.mark.parametrize(("which", "variant"), CASES)
def test_a_resumed_training_is_the_undisturbed_one_bit_for_bit(
    launched: Callable[[str], Found], which: str, variant: str
) -> None:
    """Compare weights, buffers, momenta and the optimiser's own count of steps, on both ranks."""
    facts = launched(which).facts[variant]
    assert {key: facts[key] for key in ("restored", "weights", "moved", "kept")} == dict.fromkeys(
        ("restored", "weights", "moved", "kept"), 2.0
    )
    assert facts["steps"] == 2 * 2 * HALF


@pytest.mark.parametrize(("which", "variant"), CASES)
def test_the_pieces_of_all_ranks_are_every_weight(launched: Callable[[str], Found], which: str, variant: str) -> None:
    found = launched(which)
    run_dir = found.runs / variant
    path = checkpoint.folder(run_dir) / checkpoint.tag(HALF)
    expected = load_file(run_dir / "middle.safetensors")
    weights = whole(path, "weight") | load_file(path / "buffers.safetensors")
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(weights[name].float().view(value.shape), value), name
    copies = 2 if variant.startswith("zero0") else 1  # both ranks hold them, or share them
    turned, first, second = (whole(path, key) for key in ("momentum_buffer", "exp_avg", "exp_avg_sq"))
    assert first.keys() == second.keys()
    assert (bool(turned), bool(first)) == MOMENTA.get(variant.split("-")[-1], (False, True))
    all_of_them = whole(path, "weight")
    assert turned.keys() | first.keys() == all_of_them.keys()
    assert not turned.keys() & first.keys()
    entries = sum(value.numel() for kept in (all_of_them, turned, first, second) for value in kept.values())
    assert found.facts[variant]["entries"] == copies * entries
