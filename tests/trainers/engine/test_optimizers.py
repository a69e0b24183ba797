"""Muon rotates the hidden matrices and nothing else; its step follows an oracle of singular vectors."""

from collections.abc import Collection
from pathlib import Path

import pytest
import torch

import zoo
from tests.tools.launching import ROOT, run_ranks
from tests.tools.small_models import distinct
from trainers.engine.optimizers import is_hidden_matrix, make_optimizer
from trainers.settings import OptimizerConfig
from zoo.models.overview import tiny_options

LR, DECAY, MU, BETAS = 0.01, 0.05, 0.95, (0.9, 0.999)
MUON = OptimizerConfig("muon", LR, weight_decay=DECAY, momentum=MU, betas=BETAS)


@pytest.mark.parametrize("name", distinct())
def test_ends_vectors_and_tables_are_left_to_adamw(name: str) -> None:
    model = zoo.create_model(name, **tiny_options(name))
    spared: Collection[str] = getattr(model, "no_weight_decay", tuple)()
    turned = {key for key, weight in model.named_parameters() if is_hidden_matrix(key, weight, spared)}
    groups = make_optimizer(model, MUON).param_groups
    names = {id(weight): key for key, weight in model.named_parameters()}
    assert turned == {names[id(w)] for group in groups if group["use_muon"] for w in group["params"]}
    assert sorted(names.values()) == sorted(names[id(w)] for group in groups for w in group["params"])
    assert turned
    assert not [key for key in turned if "table" in key or "embed" in key or "head" in key.split(".")]
    linear = {key for key, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    inside = {f"{key}.weight" for key in linear if not key.startswith("head")}
    assert inside <= turned | {key for key in inside if key not in names.values()}, "or they are parametrised"


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon"])
def test_layers_nearer_to_the_images_learn_slower(name: str) -> None:
    """The head has the whole learning rate; in timm the last norm belongs to the last block."""
    model = zoo.create_model("spec_vit_ti", **(tiny_options("spec_vit_ti") | {"depth": 2}))
    groups = make_optimizer(model, OptimizerConfig(name, LR, layer_decay=0.5)).param_groups
    scale = {id(weight): group["lr_scale"] for group in groups for weight in group["params"]}
    found = {key: scale[id(weight)] for key, weight in model.named_parameters()}
    layers: list[tuple[str, ...]] = [("head",), ("norm", "blocks.1"), ("blocks.0",), ("",)]
    for key, value in found.items():
        layer = next(number for number, start in enumerate(layers) if key.startswith(start))
        assert value == 0.5**layer, key
    assert len(set(found.values())) == len(layers)


@pytest.mark.slow
def test_layers_learn_so_at_every_stage(tmp_path: Path) -> None:
    run_ranks(ROOT / "tests" / "tools" / "workers" / "layer_decay.py", cwd=tmp_path)


def test_a_step_is_that_of_the_oracles() -> None:
    """For matrices M/|M| = U S V^T the step is U D V^T with D near 1, scaled; for the rest it is AdamW's."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(24, 40), torch.nn.Linear(40, 40, bias=False))
    model.head = torch.nn.Linear(40, 5)
    weights = dict(model.named_parameters())
    rest = [name for name in weights if weights[name].ndim == 1 or name.startswith("head")]
    copies = {name: weights[name].detach().clone() for name in weights}
    groups = [
        {"params": [copies[name] for name in rest if weights[name].ndim == ndim], "weight_decay": decay}
        for ndim, decay in ((1, 0.0), (2, DECAY))
    ]
    adamw, muon = torch.optim.AdamW(groups, lr=LR, betas=BETAS), make_optimizer(model, MUON)
    momentum = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    for _ in range(3):
        before = {name: weight.detach().clone() for name, weight in weights.items()}
        for name, weight in weights.items():
            weight.grad = torch.randn_like(weight)
            copies[name].grad = weight.grad.clone()
            momentum[name] = MU * momentum[name] + (1 - MU) * weight.grad
        muon.step()
        adamw.step()
        for name in rest:
            assert torch.allclose(weights[name], copies[name], rtol=0, atol=1e-6), name
        for name in weights.keys() - rest:
            u, _, vh = torch.linalg.svd(momentum[name], full_matrices=False)
            step = (before[name] * (1 - LR * DECAY) - weights[name]) / (LR * 0.2 * max(weights[name].shape) ** 0.5)
            turned = u.mT @ step @ vh.mT
            assert (step - u @ turned @ vh).norm() < 0.02 * step.norm(), "in the same subspaces"
            large = turned.diagonal()[: len(turned) // 2]  # five steps raise small singular values less
            assert ((large > 0.6) & (large < 1.3)).all()
            assert (turned - turned.diagonal().diag()).abs().max() < 0.1
