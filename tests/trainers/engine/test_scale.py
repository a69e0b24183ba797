"""Techniques for models larger than a device, in one process: parts, recomputed blocks, precisions."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zoo
from certizoo.attacks import AttackConfig
from trainers.engine import engine
from trainers.engine.engine import ds_config
from trainers.engine.wrappers import EngineModel, recompute_blocks_
from trainers.model_parts import blocks_of
from trainers.settings import DeepSpeedConfig, TrainConfig

SMALL: dict[str, Any] = {"img_size": 8, "in_chans": 1, "num_classes": 10}
SIZE: dict[str, Any] = SMALL | {"patch_size": 4, "global_pool": "avg", "embed_dim": 32, "depth": 2, "num_heads": 2}
SWIN = SMALL | {"embed_dim": 16, "depths": (1, 1), "num_heads": (1, 2), "patch_size": 2, "window_size": 2}


def capped() -> nn.Module:
    """Return a model with vectors that move in each pass, drop-path, and MSVP's branches."""
    torch.manual_seed(0)
    attention = {"name": "dp", "v_cap": 0.3, "o_cap": 0.3}
    return zoo.create_model("dp_vit_ti", **SIZE, attention=attention, drop_path_rate=0.3).train()


def pass_twice(model: nn.Module) -> list[Tensor]:
    """Return gradients and buffers after two passes."""
    images, labels = torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(4)
    for seed in range(2):
        torch.manual_seed(seed)
        loss = F.cross_entropy(model(images), labels) + zoo.penalty.msvp(model, 0.1, 0.1, 0.1)
        loss.backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None] + list(model.buffers())


def test_recomputed_blocks_have_the_same_gradients_and_buffers() -> None:
    """A pass that changes its buffers and draws random numbers is repeated exactly."""
    plain, recomputed = capped(), capped()
    assert recompute_blocks_(recomputed) == 2
    for one, other in zip(pass_twice(plain), pass_twice(recomputed), strict=True):
        assert torch.equal(one, other)


def test_recomputed_blocks_keep_their_inputs_only() -> None:
    """They save fewer than a third of the numbers, for a second pass through each block."""

    def saved(model: nn.Module) -> int:
        sizes: dict[int, int] = {}
        own = {parameter.data_ptr() for parameter in model.parameters()}

        def pack(tensor: Tensor) -> Tensor:
            if tensor.data_ptr() not in own:
                sizes[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(torch.rand(64, 1, 8, 8)).sum()
        runs: list[int] = []
        for block in blocks_of(model):
            block.get_submodule("mlp").register_forward_hook(lambda *_: runs.append(1))
        loss.backward()
        assert len(runs) == (2 if "forward" in vars(blocks_of(model)[0]) else 0)
        return sum(sizes.values())

    plain, recomputed = capped(), capped()
    recompute_blocks_(recomputed)
    assert 3 * saved(recomputed) < saved(plain)


def test_a_penalty_in_parts_is_the_penalty() -> None:
    """Value and gradients agree, and no tensor of a model is saved twice."""
    model, other = capped(), capped()
    owners = [module for module in model.modules() if isinstance(module, zoo.penalty.HasSpectralTerms)]
    owners = [owner for owner in owners if "q" in {branch for branch, *_ in owner.spectral_terms()}]
    wrapped = EngineModel(model, owners)
    other.load_state_dict(model.state_dict())
    total = torch.zeros((), requires_grad=True)
    for weights in wrapped.gathered:
        total = weights(total, lambda owner: zoo.penalty.msvp(owner, 0.1, 0.2, 0.3))
    whole = zoo.penalty.msvp(other, 0.1, 0.2, 0.3)
    assert total.item() == pytest.approx(whole.item(), rel=1e-6)
    total.backward(), whole.backward()
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert (one.grad is None) == (two.grad is None)
        if one.grad is not None and two.grad is not None:
            assert torch.allclose(one.grad, two.grad, rtol=1e-5, atol=1e-8)
    assert list(wrapped.state_dict()) == [f"model.{key}" for key in model.state_dict()]
    assert len(list(wrapped.parameters())) == len(list(model.parameters()))


@pytest.mark.parametrize("name", ["dp_vit_ti", "l2_vit_ti", "scsa_vit_ti", "ln_vit_ti", "dp_convit_ti", "dp_swin_t"])
def test_training_and_attack_run_on_the_fused_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One call for each attention and pass, in all variants; no scores are stored (GPSA: up to FEW tokens)."""
    monkeypatch.setattr("zoo.attention.gpsa.FEW", 0)
    model = zoo.create_model(name, **(SWIN if "swin" in name else SIZE | {"patch_size": 2}))
    calls: list[int] = []
    kernel: Callable[..., Tensor] = F.scaled_dot_product_attention

    def counted(*args: Any, **options: Any) -> Tensor:
        calls.append(1)
        return kernel(*args, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", counted)
    AttackConfig(norm="l2", eps=0.5, steps=3).run(model, torch.rand(2, 1, 8, 8), torch.arange(2), keep_worst=False)
    model(torch.rand(2, 1, 8, 8)).sum().backward()
    assert len(calls) == 2 * (3 + 1)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("clip", [0.0, 1.0, 5.0])
def test_clipping_is_always_written(stage: int, clip: float) -> None:
    """Without the key DeepSpeed would clip at 1."""
    train = TrainConfig(epochs=1, batch_size=8, clip_grad=clip)
    config = ds_config(train, DeepSpeedConfig(stage, offload_optimizer=stage > 0), world_size=2, weights=1000)
    assert config["gradient_clipping"] == clip
    assert config["zero_optimization"]["offload_optimizer"]["device"] == ("cpu" if stage else "none")


def test_a_training_leaves_the_linear_function_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """ZeRO 3 replaces it, and certificates rely on torch's own without a check."""
    own = F.linear
    monkeypatch.setattr(F, "linear", lambda *args: -own(*args))
    monkeypatch.setattr(engine.dist, "barrier", lambda: None)
    with engine.kept():
        engine.stop()
    assert F.linear is own
