"""Results do not depend on harmless process state: threads and inference mode."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from certify import certified_radius, certify, evaluate
from certify.api import certifier, radius_of
from certizoo import UserError
from tests.tools.small_models import labelled, small_model
from zoo.bounds.float_error import RunningError
from zoo.bounds.stepwise import StepwiseAttention

THREADS, REPEATS = 3, 2


@pytest.mark.parametrize("method", ["lofast", "lofast_local", pytest.param("adjoint", marks=pytest.mark.slow)])
def test_threads_give_the_answers_of_one(method: str) -> None:
    model = small_model("standard", 0)
    x, y = labelled(model, 4, 0)
    expected = certified_radius(model, x, y, method, nonce="a")

    def ask(_: int) -> Tensor:
        return certified_radius(model, x, y, method, nonce="a")

    with ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(ask, range(THREADS * REPEATS)))
    assert all(torch.equal(radius, expected) for radius in found)


def test_one_certifier_answers_several_threads() -> None:
    model = small_model("standard", 0)
    x, y = labelled(model, 3, 0)
    made = certifier(model, "adjoint", nonce="a")
    expected = torch.cat([radius_of(made.analyse(x[i : i + 1], y[i : i + 1])) for i in range(3)])
    with ThreadPoolExecutor(THREADS) as pool:
        found = torch.cat(list(pool.map(lambda i: radius_of(made.analyse(x[i : i + 1], y[i : i + 1])), range(3))))
    assert torch.equal(found, expected)


def test_no_switch_of_the_process_is_turned() -> None:
    """All threads share the switches of fused attention; this one reads them while others certify."""
    model = small_model("standard", 0)
    x, y = labelled(model, 2, 0)
    expected, seen = switches(), set[tuple[bool, ...]]()
    with ThreadPoolExecutor(THREADS) as pool:
        asked = [pool.submit(certified_radius, model, x, y, "adjoint") for _ in range(THREADS)]
        while not all(answer.done() for answer in asked):
            seen.add(switches())
            time.sleep(1e-4)
    assert seen | {switches()} == {expected}


def switches() -> tuple[bool, ...]:
    kernels = torch.backends.cuda
    return kernels.flash_sdp_enabled(), kernels.mem_efficient_sdp_enabled(), kernels.cudnn_sdp_enabled()


MASKS: dict[str, Tensor | None] = {"none": None, "added": torch.randn(5, 5, dtype=torch.float64)}


@pytest.mark.parametrize("mask", MASKS)
@torch.no_grad()
def test_attention_is_followed_step_by_step(mask: str) -> None:
    q, k, v = torch.randn(3, 2, 3, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    bias = MASKS[mask]
    scores = 0.3 * q @ k.mT
    slow = (scores if bias is None else scores + bias).softmax(-1) @ v
    with StepwiseAttention(), RunningError() as running:
        found = running.of(F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=0.3))
    torch.testing.assert_close(found.value, slow, rtol=1e-12, atol=1e-14)
    assert bool((found.error > 0).all())
    assert bool((found.error < 1e-12).all())
    assert bool(((found.value - slow).abs() <= 2 * found.error).all())


def test_a_mask_that_is_not_added_is_refused() -> None:
    q = torch.randn(1, 1, 5, 4, dtype=torch.float64)
    with StepwiseAttention(), pytest.raises(UserError, match=r"mask of torch\.bool"):
        F.scaled_dot_product_attention(q, q, q, torch.ones(5, 5, dtype=torch.bool))


@pytest.mark.parametrize("method", ["lofast", "adjoint", "image"])
def test_inference_mode_changes_nothing(method: str) -> None:
    model = small_model("standard", 0)
    x, y = labelled(model, 2, 0)
    expected = certify(model, x, y, 0.1, method, nonce="a")
    with torch.inference_mode():
        images, labels, inside = x.double() * 1, y * 1, small_model("standard", 0)
        for given in (model, inside):
            found = certify(given, images, labels, 0.1, method, nonce="a")
            assert torch.equal(found.loss_B, expected.loss_B)
            assert torch.equal(found.certified_B, expected.certified_B)
        analysis = certifier(model, method, nonce="a")
        with pytest.raises(UserError, match=r"torch\.inference_mode is active"):
            analysis.analyse(x, y).at(0.1)
    found = analysis.analyse(images, labels).at(0.1)  # tensors that inference mode made
    assert torch.equal(found.loss_B, expected.loss_B)


def test_radii_and_tables_leave_inference_mode_too() -> None:
    model = small_model("standard", 0)
    x, y = labelled(model, 2, 0)
    expected = certified_radius(model, x, y, "lofast", nonce="a")
    analysis = certifier(model, "lofast").analyse(x, y)
    with torch.inference_mode():
        assert torch.equal(certified_radius(model, x, y, "lofast", nonce="a"), expected)
        assert torch.equal(radius_of(analysis), expected)
        assert list(evaluate(model, x, y, eps=[0.1], method="lofast")["radius.lofast"]) == expected.tolist()
