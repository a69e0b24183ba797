"""MFU counts the passes that a training step makes, and is silent where the device's peak is unknown."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import zoo
from certizoo.attacks import AttackConfig
from trainers.job.utilisation import forward_flops, meter, passes
from trainers.objectives import OBJECTIVES, Probe
from trainers.settings import ObjectiveConfig

ATTACK = AttackConfig("l2", 0.5, 3)
IMAGES = 8


class Products(TorchDispatchMode):
    """Counts the operations of matrix products; FlopCounterMode refuses gradients with respect to images."""

    flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func.overloadpacket in flop_registry:
            self.flops += flop_registry[func.overloadpacket](*args, **(kwargs or {}), out_val=found)
        return found


def job_of(objective: str, attack: AttackConfig, sam_rho: float = 0.0) -> Any:
    train, data = SimpleNamespace(sam_rho=sam_rho, precision="bf16"), SimpleNamespace(kind="images")
    return SimpleNamespace(
        objective=SimpleNamespace(name=objective), attack=attack, train=train, model=MODEL, data=data
    )


MODEL: dict[str, Any] = {
    "name": "dp_vit_ti",
    "depth": 2,
    "num_classes": 10,
    "in_chans": 3,
    "img_size": 16,
    "patch_size": 4,
}


@pytest.mark.parametrize(
    ("objective", "restarts"), [("clean", 1), ("pgd_at", 1), ("pgd_at", 2), ("trades", 1), ("mart", 1)]
)
def test_passes_are_those_of_a_real_step(objective: str, restarts: int) -> None:
    """The arithmetic of a step, counted by torch, is as many forward passes (to 4 %: the first layer differs)."""
    model, attack = zoo.create_model(**MODEL), replace(ATTACK, restarts=restarts)

    def through(measure: Any, *inputs: Any) -> Any:
        return measure(model, *inputs)

    def attacked(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return attack.run(model, images, labels, keep_worst=restarts > 1)

    probe = Probe(through, attacked, lambda images: model(images).detach(), ObjectiveConfig(objective))
    images, labels = torch.rand(IMAGES, 3, 16, 16), torch.arange(IMAGES)
    with sdpa_kernel(SDPBackend.MATH), Products() as products:
        OBJECTIVES[objective](probe, images, labels)["loss"].backward()
    counted = products.flops / (forward_flops(MODEL) * IMAGES)
    assert counted == pytest.approx(passes(job_of(objective, attack)), rel=0.04)


def test_the_share_of_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of("clean", ATTACK)
    assert meter(job, 2)(100.0) == {}  # a CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for device, peak in (("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA H100 PCIe", 756e12), ("NVIDIA Unheard", 0)):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=device: device)
        found = meter(job, 2)(1e6)
        assert found == ({"mfu": pytest.approx(3 * forward_flops(MODEL) * 1e6 / (2 * peak))} if peak else {})
    assert passes(job_of("curvature", ATTACK)) is None
    assert passes(job_of("clean", ATTACK, sam_rho=0.1)) == 6
