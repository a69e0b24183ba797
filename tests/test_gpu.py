"""A GPU gives the answers of a CPU, and the command trains there in bfloat16 (pytest -m gpu)."""

import json
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from certify import certified_radius
from certizoo.attacks import AttackConfig
from tests.tools.launching import ROOT, TINY, finish, launch
from tests.tools.small_models import PARTS, labelled, small_model
from trainers.engine.optimizers import make_optimizer
from trainers.settings import OptimizerConfig
from zoo.bounds import lanczos

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"),
]


@pytest.mark.parametrize("method", ["lofast", "adjoint", "best"])
@pytest.mark.parametrize("parts", PARTS)
def test_radii_are_those_of_a_cpu(parts: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both start from the same random vectors."""
    on_host = lanczos.starts
    monkeypatch.setattr(lanczos, "starts", lambda images, *of: on_host(images.cpu(), *of).to(images.device))
    model = small_model(parts, 0)
    images, labels = labelled(model, 4, 0)
    here = certified_radius(model, images, labels, method, nonce="one")
    there = certified_radius(model.cuda(), images.cuda(), labels.cuda(), method, nonce="one").cpu()
    assert torch.allclose(here, there, rtol=1e-6, atol=0)


def test_random_starts_are_gaussian_and_an_images_own() -> None:
    images, shape = torch.rand(3, 3, 8, 8, device="cuda"), torch.Size([2, 10**6])
    drawn = lanczos.starts(images, shape, b"one")
    assert drawn.dtype == torch.float64
    assert drawn.is_cuda
    assert torch.equal(lanczos.starts(images[1:2], shape, b"one")[0], drawn[1]), "neighbours change nothing"
    vectors = torch.cat([drawn.flatten(0, 1), lanczos.starts(images[:1], shape, b"two")[0]])
    products = vectors @ vectors.mT / shape[-1]
    off = products - torch.eye(len(vectors), dtype=torch.float64, device="cuda")
    assert off.abs().max() < 7e-3, "five standard deviations of a square are that"
    normal = torch.distributions.Normal(0.0, 1.0)
    below = torch.stack([(vectors < x).double().mean(1).cpu() for x in (-2.0, -1.0, 0.0, 0.5, 1.5)])
    assert (below - normal.cdf(torch.tensor([[-2.0], [-1.0], [0.0], [0.5], [1.5]]))).abs().max() < 2.5e-3


def test_an_attack_finds_what_it_finds_on_a_cpu() -> None:
    model = small_model("standard", 1)
    images, labels = labelled(model, 8, 1)
    attack = AttackConfig("l2", 0.5, steps=10, random_start=False)
    here, there = attack.run(model, images, labels), attack.run(model.cuda(), images.cuda(), labels.cuda()).cpu()
    assert (here - there).abs().max() <= 1e-3


def test_the_fused_adamw_takes_the_steps_of_the_plain_one() -> None:
    fused, plain = (small_model("standard", 1).cuda() for _ in range(2))
    config = OptimizerConfig("adamw", 1e-2, weight_decay=0.05)
    images, labels = (tensor.cuda() for tensor in labelled(small_model("standard", 1), 8, 1))
    quick = make_optimizer(fused, config)
    slow = torch.optim.AdamW(make_optimizer(plain, config).param_groups, lr=1e-2, betas=config.betas, fused=False)
    for group in slow.param_groups:
        group["fused"] = False
    assert quick.defaults["fused"]
    for _ in range(5):
        for model, optimizer in ((fused, quick), (plain, slow)):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images.float()), labels).backward()
            optimizer.step()
    for one, other in zip(fused.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("attention_backend", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION"])
def test_every_kernel_of_attention_gives_what_the_plain_one_does(attention_backend: str) -> None:
    """The shapes are those of ViT-B/16: 197 tokens, heads of 64, in bfloat16."""
    q, k, v = (torch.randn(4, 12, 197, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    attend = torch.nn.functional.scaled_dot_product_attention
    with sdpa_kernel(SDPBackend[attention_backend]):
        found = attend(q, k, v)
    assert (found.float() - attend(q.float(), k.float(), v.float())).abs().max() < 2e-2


def test_the_trainer_settles_for_bfloat16_and_ends(folder: Path) -> None:
    script = ROOT / "trainers" / "adv_train.py"
    gpu = {"CUDA_VISIBLE_DEVICES": "0", "DS_ACCELERATOR": "cuda", "LOCAL_SIZE": "1"}
    status, output = finish(launch(script, *TINY, "name=gpu", "train.max_steps=4", cwd=folder, more=gpu))
    assert status == 0, output
    assert "train.precision=bf16" in output
    rows = [json.loads(line) for line in (folder / "runs" / "gpu" / "metrics.jsonl").read_text().splitlines()]
    assert all(row["loss"] < 10 for row in rows if "loss" in row)
