"""Every objective follows its equation, written out image by image in float64: value and gradient."""

import importlib
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zoo
from certizoo import UserError
from certizoo.attacks import AttackConfig
from tests.tools.objective_oracles import ORACLES as MARGINS
from tests.tools.objective_oracles import conv_net, slow_lmce
from trainers.objectives import LIPSCHITZ, OBJECTIVES, SOFT_LABELS, Probe
from trainers.objectives.mart import boosted_cross_entropy
from trainers.settings import ObjectiveConfig
from zoo.models import hidden_radius as reach_file
from zoo.models.hidden_radius import reach

EPS, BETA, SPARSITY, CLASSES = 0.02, 2.5, 0.3, 5


def vit() -> nn.Module:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"embed_dim": 16, "depth": 1, "num_heads": 2, "patch_size": 4, "img_size": 8, "in_chans": 1}
    return zoo.create_model("dp_vit_ti", num_classes=CLASSES, global_pool="avg", init="orthogonal", **sizes).double()


def batch(size: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    images = torch.rand(size, 1, 8, 8, generator=generator, dtype=torch.float64)
    return images, torch.randint(0, CLASSES, (size,), generator=generator)


def shifted(images: Tensor, labels: Tensor) -> Tensor:
    """Stand in for an attack: the points depend on the arguments."""
    told = labels.double() if labels.ndim == 1 else labels @ torch.arange(CLASSES, dtype=labels.dtype)
    return (images + 0.05 * (told - 2)[:, None, None, None]).clamp(0, 1)


def settings_of(name: str) -> ObjectiveConfig:
    return ObjectiveConfig(name, eps=EPS, beta=BETA, sparsity=SPARSITY)


def probe_of(name: str, model: nn.Module, **more: Any) -> Probe:
    def through(measure: Callable[..., Any], *inputs: Any) -> Any:
        return measure(model, *inputs)

    def predict(images: Tensor) -> Tensor:
        with torch.no_grad():
            return model(images)

    return Probe(through, shifted, predict, settings_of(name), **({"progress": 1.0} | more))


# the equations -------------------------------------------------------------------------------------------------------


def slow_clean(model: nn.Module, image: Tensor, label: int, adversarial: Tensor) -> Tensor:
    return -model(image[None])[0].log_softmax(0)[label]


def slow_pgd_at(model: nn.Module, image: Tensor, label: int, adversarial: Tensor) -> Tensor:
    return -model(adversarial[None])[0].log_softmax(0)[label]


def kl(p: Tensor, q: Tensor) -> Tensor:
    return sum((p[k] * (p[k] / q[k]).log() for k in range(len(p))), torch.zeros((), dtype=p.dtype))


def slow_trades(model: nn.Module, image: Tensor, label: int, adversarial: Tensor) -> Tensor:
    p, q = model(image[None])[0].softmax(0), model(adversarial[None])[0].softmax(0)
    return -p[label].log() + BETA * kl(p, q)


def slow_mart(model: nn.Module, image: Tensor, label: int, adversarial: Tensor) -> Tensor:
    p, q = model(image[None])[0].softmax(0), model(adversarial[None])[0].softmax(0)
    rival = max(float(q[k].detach()) for k in range(len(q)) if k != label)
    (best,) = [q[k] for k in range(len(q)) if k != label and float(q[k].detach()) == rival]
    return -q[label].log() - (1 - best).log() + BETA * kl(p, q) * (1 - p[label])


def matrix(affine: nn.Module, shape: tuple[int, ...]) -> Tensor:
    """Return the layer as a dense matrix, column by column."""
    size = math.prod(shape)
    return affine(torch.eye(size, dtype=torch.float64).view(size, *shape)).flatten(1).T


def matrices(model: Any) -> list[Tensor]:
    """Return the matrices of all layers before the head."""
    conv1, _, conv2, _ = model.convs
    return [matrix(conv1, (1, 8, 8)), matrix(conv2, (3, 8, 8)), model.fcs[1].weight]


def slow_constant(model: Any) -> Tensor:
    norms = [torch.linalg.matrix_norm(weight, 2) for weight in matrices(model)]
    return torch.stack(norms).prod() / 0.25


def slow_lmt(model: nn.Module, image: Tensor, label: int, adversarial: Tensor) -> Tensor:
    growth = math.sqrt(2) * EPS * slow_constant(model) * torch.linalg.matrix_norm(model.get_parameter("head.weight"), 2)
    z = model(image[None])[0]
    return -torch.stack([z[k] + growth * (k != label) for k in range(CLASSES)]).log_softmax(0)[label]


def slow_gloro(model: nn.Module, image: Tensor, label: int, adversarial: Tensor) -> Tensor:
    z, w = model(image[None])[0], model.get_parameter("head.weight")
    j = int(z.argmax())
    rivals = [z[k] + EPS * slow_constant(model) * (w[j] - w[k]).norm() for k in range(CLASSES) if k != j]
    bottom = max(rivals, key=lambda rival: float(rival.detach()))
    p, q = z.softmax(0), torch.cat([z, bottom[None]]).softmax(0)
    return -z.log_softmax(0)[label] + BETA * kl(p, q)


def slow_local_lip(model: Any, image: Tensor, label: int, adversarial: Tensor) -> Tensor:
    h, r = model.normalize(image[None]).flatten(), torch.tensor(EPS / 0.25, dtype=torch.float64)
    d, shares, hinges = torch.ones_like(h), [], []
    for w, theta in zip(matrices(model), [model.convs[1].theta, model.convs[3].theta, model.fcs[2].theta], strict=True):
        y, theta = w @ h, theta.flatten()
        way = torch.stack([(w[i] * d).norm() for i in range(len(w))]).detach() * r.detach()
        moves = ((y + way > 0) & (y - way < theta)).double().detach()
        r = r * torch.linalg.matrix_norm(moves[:, None] * w * d, 2)
        h, d = torch.minimum(y.relu(), theta), moves
        hinges.append(((y + way).relu() + (theta - (y - way)).relu()).mean())
        shares.append(float(moves.mean()))
    assert 0 < min(shares) < 0.9, "some units stand still"
    w = model.head.weight
    worst = [
        (w @ h)[k] + r * ((w[label] - w[k]) * d).norm() * (k != label) if k != label else (w @ h)[k]
        for k in range(CLASSES)
    ]
    return -torch.stack(worst).log_softmax(0)[label] + SPARSITY * torch.stack(hinges).mean()


def slow_margin(name: str, model: nn.Module, image: Tensor, label: int, adversarial: Tensor) -> Tensor:
    return MARGINS[name](model, image, label, settings_of(name))


SLOW: dict[str, Callable[[Any, Tensor, int, Tensor], Tensor]] = {
    "clean": slow_clean,
    "gloro": slow_gloro,
    "lmce": lambda model, image, label, _: slow_lmce(model, image[None], torch.tensor([label]), EPS),
    "lmt": slow_lmt,
    "local_lip": slow_local_lip,
    "mart": slow_mart,
    "pgd_at": slow_pgd_at,
    "trades": slow_trades,
    **{name: partial(slow_margin, name) for name in MARGINS},
}


def model_for(name: str) -> Any:
    return conv_net() if name in LIPSCHITZ else vit()


@pytest.fixture
def converged_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach_file, "ITERATIONS", 2000)
    monkeypatch.setattr(reach_file, "LOCAL_ITERATIONS", 500)
    estimate = zoo.spectral.sigma_estimate
    module = importlib.import_module("trainers.objectives.lmt")
    monkeypatch.setattr(module, "sigma_estimate", lambda weight: estimate(weight, 2000))


@pytest.mark.usefixtures("converged_norms")
@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_loss_and_gradient_are_those_of_the_equation(name: str) -> None:
    model, (images, labels) = model_for(name), batch()
    terms = OBJECTIVES[name](probe_of(name, model), images, labels)
    told = model(images).softmax(1).detach() if name == "trades" else labels
    points = shifted(images, told)
    triples = zip(images, labels.tolist(), points, strict=True)
    expected = torch.stack([SLOW[name](model, *triple) for triple in triples]).mean()
    assert terms["loss"].dtype == torch.float64
    assert abs(float((terms["loss"] - expected).detach())) <= 1e-5
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    got = torch.autograd.grad(terms["loss"], weights, allow_unused=True)
    wanted = torch.autograd.grad(expected, weights, allow_unused=True)
    assert sum(grad is not None for grad in wanted) >= 5
    for mine, theirs in zip(got, wanted, strict=True):
        assert (
            (mine is None or not mine.any()) if theirs is None else (mine - theirs).norm() <= 1e-4 * (1 + theirs.norm())
        )


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_terms_are_named_and_only_the_loss_has_a_gradient(name: str) -> None:
    images, labels = batch()
    terms = OBJECTIVES[name](probe_of(name, model_for(name)), images, labels)
    assert {"loss", "acc"} <= set(terms)
    assert [key for key, value in terms.items() if value.requires_grad] == ["loss"]
    assert all(value.ndim == 0 and value.isfinite() for value in terms.values())


# single objectives ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SOFT_LABELS)
def test_soft_labels_of_one_class_are_that_class(name: str) -> None:
    images, labels = batch()
    model = model_for(name)
    hard = OBJECTIVES[name](probe_of(name, model), images, labels)
    soft = OBJECTIVES[name](probe_of(name, model), images, F.one_hot(labels, CLASSES).double())
    for key, value in hard.items():
        assert float(value.detach()) == pytest.approx(float(soft[key].detach()))


def test_trades_attack_climbs_the_divergence() -> None:
    """The loss 'ce' with soft labels, from a random start, moves further from p(x) than random points."""
    model, (images, _) = vit(), batch()
    attack = AttackConfig("l2", 0.5, steps=10)
    p = model(images).softmax(1).detach()

    def divergence(points: Tensor) -> Tensor:
        return F.kl_div(model(points).log_softmax(1), p, reduction="none").sum(1).detach()

    found = divergence(attack.run(model, images, p, torch.Generator().manual_seed(0), keep_worst=False))
    noise = torch.randn(50, *images.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    random = [divergence((images + 0.5 * n / n.flatten(1).norm(dim=1)[:, None, None, None]).clamp(0, 1)) for n in noise]
    assert (found > torch.stack(random).amax(0)).all()


def test_mart_stays_finite_where_the_model_is_sure() -> None:
    """In float32 1 - p_j rounds to 0, and -log(1 - p_j) must not overflow."""
    logits = torch.tensor([[200.0, 0.0, -5.0], [0.0, 200.0, 1.0]], requires_grad=True)
    loss = boosted_cross_entropy(logits, torch.tensor([1, 1]))
    assert loss.tolist() == pytest.approx([400.0 - math.log1p(math.exp(-5)), 0.0])
    loss.sum().backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


@pytest.mark.usefixtures("converged_norms")
@pytest.mark.parametrize("local", [False, True])
def test_no_attack_moves_the_last_layer_further_than_its_reach(local: bool) -> None:
    """Ascend ||h' - h|| / r over the ball, and check the units that are said to be inactive."""
    model, (images, _) = conv_net(), batch()
    found = reach(model, images, EPS, local)
    radius, moving = found.radius_B, found.moving_BF
    hidden = model.forward_head(model.forward_features(images), pre_logits=True).detach()
    x = (images + 0.01 * torch.randn_like(images)).requires_grad_()
    for _ in range(60):
        change = model.forward_head(model.forward_features(x), pre_logits=True) - hidden
        (grad,) = torch.autograd.grad(change.norm(dim=1).sum(), x)
        step = (x.detach() + 0.1 * grad / grad.flatten(1).norm(dim=1).clamp_min(1e-9)[:, None, None, None]) - images
        length = step.flatten(1).norm(dim=1)[:, None, None, None]
        x = (images + step * (EPS / length).clamp_max(1)).requires_grad_()
    change = (model.forward_head(model.forward_features(x), pre_logits=True) - hidden).detach()
    assert (change.norm(dim=1) <= radius * (1 + 1e-9)).all()
    assert (change.norm(dim=1) > 0.05 * radius).any(), "the ascent gets somewhere"
    assert not change[moving == 0].any()


def test_the_local_radius_is_the_smaller_one() -> None:
    model, (images, _) = conv_net(), batch()
    local, everywhere = (reach(model, images, EPS, local).radius_B for local in (True, False))
    assert (local < 0.99 * everywhere).all()


def test_training_for_the_margin_certifies_images() -> None:
    """GloRo on two easy classes classifies most images right and not as bottom; clean training fewer."""
    torch.manual_seed(0)
    labels = torch.arange(32) % 2
    images = (0.3 + 0.4 * labels[:, None, None, None] + 0.05 * torch.randn(32, 1, 8, 8)).double().clamp(0, 1)

    def robust(name: str) -> float:
        torch.manual_seed(0)
        model = conv_net()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        for step in range(80):
            terms = OBJECTIVES[name](probe_of(name, model, progress=step / 80), images, labels)
            optimizer.zero_grad()
            terms["loss"].backward()
            optimizer.step()
        return float(OBJECTIVES["gloro"](probe_of("gloro", model), images, labels)["robust"])

    found = {name: robust(name) for name in ("clean", *LIPSCHITZ)}
    assert min(found[name] for name in LIPSCHITZ) > 0.9 > found["clean"] + 0.2


def test_a_model_without_a_lipschitz_constant_is_refused() -> None:
    with pytest.raises(UserError, match="ViT has no global Lipschitz constant"):
        OBJECTIVES["gloro"](probe_of("gloro", vit()), *batch())
