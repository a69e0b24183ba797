"""Attack masks (ARD, PRM), mixed labels and SAM's ascent have their effect and restore everything afterwards."""

from typing import Any

import pytest
import torch
from torch import Generator, Tensor, nn

import zoo
from certizoo.attacks import AttackConfig
from certizoo.attacks.norms import distance
from trainers.model_parts import attentions_of
from trainers.settings import MasksConfig, MixConfig
from trainers.techniques.masks import masked, patches
from trainers.techniques.mix import mixed
from trainers.techniques.sam import ascended

BOTH = MasksConfig(ard=True, prm=True, warmup=0.5)


def vit(name: str = "dp_vit_ti") -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "embed_dim": 16,
        "depth": 3,
        "num_heads": 2,
        "patch_size": 4,
        "img_size": 16,
        "in_chans": 1,
    }
    return zoo.create_model(name, num_classes=5, **sizes).eval()


def batch(size: int = 6) -> tuple[Tensor, Tensor]:
    generator = Generator().manual_seed(1)
    return torch.rand(size, 1, 16, 16, generator=generator), torch.randint(0, 5, (size,), generator=generator)


# masks ---------------------------------------------------------------------------------------------------------------


def test_the_share_falls_from_all_to_none() -> None:
    assert [BOTH.share(t) for t in (0.0, 0.25, 0.5, 0.9)] == [1.0, 0.5, 0.0, 0.0]


def test_patches_are_whole_and_as_many_as_the_share_says() -> None:
    for share in (0.0, 0.3, 0.5, 1.0):
        mask = patches(torch.rand(2, 3, 16, 8), 4, share, Generator().manual_seed(0))
        blocks = mask.unfold(2, 4, 4).unfold(3, 4, 4).flatten(4)
        assert mask.shape == (1, 1, 16, 8)
        assert (blocks.amin(-1) == blocks.amax(-1)).all()
        assert int((blocks[..., 0] == 0).sum()) == int(share * 8)


def test_dropped_attention_passes_no_gradient_and_the_rest_is_untouched() -> None:
    """With all branches dropped the gradient is that of a model whose attention adds a constant."""
    model, (images, _) = vit(), batch()
    x = images.clone().requires_grad_()
    with masked(model, MasksConfig(ard=True), 0.0, Generator().manual_seed(0)):
        dropped = model(x)
        (grad,) = torch.autograd.grad(dropped.square().sum(), x)
    outputs: list[Tensor] = []
    hooks = [a.register_forward_hook(lambda m, i, o: outputs.append(o.detach())) for a in attentions_of(model)]
    assert len(hooks) == 3
    plain = model(x)
    for hook in hooks:
        hook.remove()
    constant = iter(outputs)
    hooks = [a.register_forward_hook(lambda m, i, o: next(constant)) for a in attentions_of(model)]
    (wanted,) = torch.autograd.grad(model(x).square().sum(), x)
    assert torch.equal(dropped, plain)
    assert torch.allclose(grad, wanted)
    (full,) = torch.autograd.grad(plain.square().sum(), x)
    assert (full - grad).norm() > 0.01 * full.norm()


@pytest.mark.parametrize("name", ["dp_vit_ti", "l2_convit_ti", "scsa_vit_ti"])
def test_a_masked_attack_stays_in_ball_and_box_and_leaves_nothing(name: str) -> None:
    model, (images, labels) = vit(name), batch()
    attack, found = AttackConfig("l2", 0.5, steps=4), []
    for _ in range(2):
        generator = Generator().manual_seed(0)
        with masked(model, BOTH, 0.2, generator) as disturb:
            found.append(attack.run(model, images, labels, generator, keep_worst=False, disturb=disturb))
    assert torch.equal(*found), "a function of the generator"
    assert (distance(found[0], images, "l2") <= 0.5 + 1e-6).all()
    assert 0 <= found[0].min() <= found[0].max() <= 1
    assert not any(module._forward_hooks for module in model.modules())
    plain = attack.run(model, images, labels, Generator().manual_seed(0), keep_worst=False)
    assert not torch.equal(found[0], plain)


def test_masks_that_have_faded_do_nothing() -> None:
    with masked(vit(), BOTH, 0.5, Generator()) as disturb:
        assert disturb is None


def test_masked_patches_start_their_step_at_the_image() -> None:
    """With a step of 0 masked patches equal the clean image; the others keep their perturbation."""
    images, _ = batch()
    x = (images + 0.1).clamp(0, 1)
    with masked(vit(), MasksConfig(prm=True), 0.125, Generator().manual_seed(3)) as disturb:  # half of the share
        assert disturb is not None
        moved = disturb(images, x)
    kept = (moved == x).all(dim=(0, 1))
    gone = (moved == images).all(dim=(0, 1))
    assert (kept | gone).all()
    assert int((gone & ~kept).sum()) == 16 * 8


# mixed labels --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [MixConfig(mixup=0.8), MixConfig(cutmix=1.0), MixConfig(mixup=0.8, cutmix=1.0)])
def test_labels_say_how_much_of_each_image_is_there(config: MixConfig) -> None:
    """Each image has its label as every pixel, so its mean pixel is the expected label."""
    labels = torch.tensor([0, 1, 2, 3, 4, 0, 1, 3])
    images = (labels / 4).view(-1, 1, 1, 1).expand(-1, 1, 16, 16).contiguous()
    for seed in range(10):
        mixed_images, soft = mixed(config, images, labels, 5, seed)
        again, _ = mixed(config, images, labels, 5, seed)
        assert torch.equal(mixed_images, again)
        assert torch.allclose(soft.sum(1), torch.ones(8))
        assert torch.allclose(mixed_images.mean((1, 2, 3)), soft @ torch.arange(5.0) / 4, atol=1e-5)
    assert torch.equal(images[:, 0, 0, 0], labels / 4), "the batch is not written to"


def test_mixing_off_changes_nothing_and_draws_nothing() -> None:
    images, labels = batch()
    assert mixed(MixConfig(), images, labels, 5, 0) == (images, labels)
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    mixed(MixConfig(mixup=1.0), images, labels, 5, 3)
    assert torch.equal(torch.rand(1), expected)


def test_an_attack_on_mixed_labels_climbs_their_cross_entropy() -> None:
    model, (images, labels) = vit(), batch()
    images, soft = mixed(MixConfig(mixup=1.0), images, labels, 5, 0)
    found = AttackConfig("l2", 0.5, steps=5).run(model, images, soft, Generator().manual_seed(0))

    def loss(x: Tensor) -> Tensor:
        return -(soft * model(x).log_softmax(1)).sum(1).detach()

    assert (loss(found) > loss(images)).all()


# sharpness -----------------------------------------------------------------------------------------------------------


def test_the_ascent_is_rho_long_along_the_gradient_and_is_taken_back() -> None:
    model, (images, labels) = vit(), batch()
    before = [weight.detach().clone() for weight in model.parameters()]
    grads = torch.autograd.grad(nn.functional.cross_entropy(model(images), labels), list(model.parameters()))
    with ascended(model, nn.functional.cross_entropy(model(images), labels), rho=0.3):
        steps = [weight.detach() - value for weight, value in zip(model.parameters(), before, strict=True)]
    flat, uphill = (torch.cat([part.flatten() for part in parts]) for parts in (steps, grads))
    assert float(flat.norm()) == pytest.approx(0.3, rel=1e-3)
    assert torch.nn.functional.cosine_similarity(flat, uphill, dim=0) > 0.9999
    assert all(torch.equal(weight, value) for weight, value in zip(model.parameters(), before, strict=True))


def test_the_ascent_is_taken_back_after_an_error() -> None:
    model, (images, _) = vit(), batch()
    before = [weight.detach().clone() for weight in model.parameters()]
    with pytest.raises(ValueError, match="boom"), ascended(model, model(images).sum(), rho=0.3):
        raise ValueError("boom")
    assert all(torch.equal(weight, value) for weight, value in zip(model.parameters(), before, strict=True))
