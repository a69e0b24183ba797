"""Settings that a command leaves open are chosen once: from the machine, the batch, or the run to resume."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from certizoo.config.compose import compose_config
from tests.tools.config_files import files, recipe
from trainers.job import auto_settings
from trainers.job.auto_settings import resolve_auto, scale_lr
from trainers.job.checkpoint import Position, Saved
from trainers.settings import OptimizerConfig

TUNED = [
    path
    for group in ("model", "experiment")
    for path in files(group)
    if "lr" in ((yaml.safe_load(path.read_text()) or {}).get("optimizer") or {})
]


def composed(*overrides: str) -> dict[str, Any]:
    return compose_config("adv_train", ["+model=dp_vit_ti", "data=cifar10", *overrides])


def saved_of(fingerprint: dict[str, Any]) -> Saved:
    return Saved("step00000001", Position(1), 1, fingerprint)


@pytest.mark.parametrize(
    ("scaling", "of", "batch", "factor"),
    [("linear", 1024, 256, 0.25), ("root", 1024, 256, 0.5), ("root", 64, 256, 2.0), ("linear", None, 8, 1.0)],
)
def test_the_learning_rate_follows_the_batch(scaling: str, of: int | None, batch: int, factor: float) -> None:
    """It is set once: a chosen value stays."""
    config = composed(f"optimizer.lr_batch={'null' if of is None else of}", f"optimizer.lr_scaling={scaling}")
    optimizer = OptimizerConfig("adamw", 1e-3, lr_batch=of, lr_scaling=scaling)
    config, own, lines = scale_lr(config, optimizer, batch)
    assert own.lr == pytest.approx(1e-3 * factor)
    assert config["optimizer"]["lr"] == own.lr
    assert bool(lines) == (factor != 1)
    assert scale_lr(config, own, batch) == (config, own, [])


@pytest.mark.parametrize("path", TUNED, ids=lambda path: path.stem)
def test_a_recipe_trains_with_the_rate_that_it_names(path: Path) -> None:
    """The recipe's lr is for its own batch size."""
    check_batch(yaml.safe_load(path.read_text()))


def test_a_shared_recipe_trains_with_the_rate_that_it_names() -> None:
    check_batch(recipe("lofast_vit_w128_l3"))


def check_batch(found: dict[str, Any]) -> None:
    assert found["optimizer"]["lr_batch"] == found["train"]["batch_size"]


GPU = {"train.precision": "bf16", "train.compile": True}
EXACT = {"train.precision": "fp32", "train.compile": False}


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], GPU),
        (["train.sam_rho=0.05"], EXACT),
        (["objective=lmce"], EXACT),
        (["train.grad_checkpointing=true"], GPU | {"train.compile": False}),
        (["masks.ard=true"], GPU | {"train.compile": False}),
        (["train.precision=fp32", "train.compile=false"], {}),
    ],
)
def test_a_gpu_is_used_as_far_as_the_technique_allows(
    overrides: Sequence[str], expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = composed("train.batch_size=8", "data.workers=0", *overrides)
    for there in (True, False):
        monkeypatch.setattr(auto_settings, "has_fast_bf16", lambda there=there: there)
        monkeypatch.setattr(auto_settings, "can_compile", lambda there=there: there)
        found, lines = resolve_auto(config, 1, None)
        for key, value in (expected if there else EXACT).items():
            assert found["train"][key.removeprefix("train.")] == value
        assert len(lines) == len(expected)
        assert resolve_auto(found, 1, None) == (found, [])


def test_without_a_gpu_nothing_is_compiled() -> None:
    if not torch.cuda.is_available():
        assert not auto_settings.has_fast_bf16()
        assert not auto_settings.can_compile()


def test_loaders_are_no_more_than_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_settings, "cores", lambda: 3)
    assert resolve_auto(composed("data.workers=8"), 1, None)[0]["data"]["workers"] == 3
    assert resolve_auto(composed("data.workers=2"), 1, None)[0]["data"]["workers"] == 2


def test_a_resumed_run_goes_on_as_it_began(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine may have other cores, a GPU or other ranks; image order depends on the number of loaders."""
    began = {"train.batch_size": 16, "train.precision": "bf16", "train.compile": True, "data.workers": 2}
    monkeypatch.setattr(auto_settings, "cores", lambda: 64)
    found, lines = resolve_auto(composed("data.workers=8"), 4, saved_of(began))
    assert {key: found[key.split(".")[0]][key.split(".")[1]] for key in began} == began
    assert len(lines) == 4


@pytest.mark.parametrize(
    ("avx512", "precision", "said"), [(False, "bf16", True), (True, "bf16", False), (False, "fp32", False)]
)
def test_a_cpu_that_computes_bfloat16_in_software_is_said(
    avx512: bool, precision: str, said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a run is far too slow to wait for, so it warns."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    cpu = {"architecture": "x86_64", "avx512_bw": avx512, "amx_bf16": False}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: cpu, raising=False)
    assert auto_settings.bf16_is_emulated(composed(f"train.precision={precision}")) is said
