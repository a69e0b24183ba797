"""Attacks stay in the ball and the box for any model, gain from more effort, and leave the model unchanged."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator, Tensor, nn

from certizoo import UserError
from certizoo.attacks import AttackConfig, fgsm, pgd
from certizoo.attacks.losses import LOSSES
from certizoo.attacks.norms import NORMS, distance

ROUNDING = 1e-6  # Linf allows a few float32 ulps of a value below 1; L2 allows sqrt(192) times as many
# float64, batches of other sizes: a BLAS cuts its sums by their shapes, so a point is off by some 1e-16 a step.
OTHER_BATCH = 1e-10


def make_model(seed: int = 0, scale: float = 1.0) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 32), nn.Tanh(), nn.Dropout(0.5), nn.Linear(32, 5))
    with torch.no_grad():
        model.get_submodule("4").get_parameter("weight").mul_(scale)
    return model


def make_images(n: int = 6, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = Generator().manual_seed(seed)
    images = torch.rand(n, 3, 8, 8, generator=generator)
    images[0], images[1] = 0.0, 1.0  # corners of the box
    return images, torch.randint(0, 5, (n,), generator=generator)


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    return (own_labels(model, x) == y).float().mean().item()


def own_labels(model: nn.Module, x: Tensor) -> Tensor:
    logits: Tensor = model.eval()(x)
    return logits.argmax(1)


@given(
    norm=st.sampled_from(sorted(NORMS)),
    loss=st.sampled_from(sorted(LOSSES)),
    eps=st.floats(0, 20),
    step_size=st.floats(1e-4, 50),
    steps=st.integers(1, 4),
    random_start=st.booleans(),
    keep_worst=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_every_result_lies_in_ball_and_box(
    norm: str, loss: str, eps: float, step_size: float, steps: int, random_start: bool, keep_worst: bool, seed: int
) -> None:
    images, labels = make_images(seed=seed)
    as_given = images.clone()
    eps = eps / 20 if norm == "linf" else eps
    attack = AttackConfig(norm, eps, steps, step_size, random_start, loss=loss)
    x = pgd(make_model(seed), images, labels, attack, Generator().manual_seed(seed), keep_worst)
    assert distance(x, images, norm).max() <= eps + ROUNDING
    assert x.min() >= 0
    assert x.max() <= 1
    assert x.dtype == images.dtype
    assert not x.requires_grad
    assert torch.equal(images, as_given), "points are made beside the images, not in them"


class Broken(nn.Module):
    """A model with a NaN gradient in every second image and a zero gradient in the others."""

    def forward(self, x: Tensor) -> Tensor:
        bad = torch.arange(len(x)) % 2 == 1
        return torch.where(bad[:, None], torch.sqrt(-x.flatten(1)[:, :5]), 0 * x.flatten(1)[:, :5])


@pytest.mark.parametrize("norm", sorted(NORMS))
def test_a_model_of_nans_does_not_leave_the_ball(norm: str) -> None:
    images, labels = make_images()
    x = pgd(Broken(), images, labels, AttackConfig(norm, 0.1, steps=3), keep_worst=False)
    assert x.isfinite().all()
    assert distance(x, images, norm).max() <= 0.1 + ROUNDING


@pytest.mark.parametrize("norm", sorted(NORMS))
@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_more_steps_and_restarts_never_raise_accuracy(norm: str, loss: str) -> None:
    model, (images, _) = make_model(), make_images(64)
    labels = own_labels(model, images)
    eps = {"linf": 0.02, "l2": 0.15}[norm]

    def robust(steps: int, restarts: int) -> float:
        attack = AttackConfig(norm, eps, steps, step_size=eps / 4, restarts=restarts, loss=loss)
        x = pgd(model, images, labels, attack, Generator().manual_seed(3))
        return accuracy(model, x, labels)

    by_steps = [1.0, *(robust(steps, 1) for steps in (1, 2, 5, 10))]
    by_restarts = [robust(2, restarts) for restarts in (1, 2, 4)]
    assert by_steps == sorted(by_steps, reverse=True)
    assert by_restarts == sorted(by_restarts, reverse=True)
    assert by_steps[-1] < 1.0, "the attack found nothing at all"


@pytest.mark.parametrize(("norm", "eps"), [("linf", 1.0), ("l2", 14.0)])
def test_a_big_ball_leaves_no_accuracy(norm: str, eps: float) -> None:
    model, (images, _) = make_model(), make_images(32)
    labels = own_labels(model, images)
    attack = AttackConfig(norm, eps, steps=20, loss="margin")
    x = pgd(model, images, labels, attack, Generator().manual_seed(0))
    assert accuracy(model, x, labels) <= 0.05


@pytest.mark.parametrize("norm", sorted(NORMS))
def test_linear_model_oracle(norm: str) -> None:
    """Check the known worst points of a linear model.

    For logits (0, <w,x>), away from the box, they are x - eps w/||w|| in L2 and x - eps sign(w) in Linf.
    """
    weight = torch.randn(12, generator=Generator().manual_seed(5))
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 2, bias=False))
    with torch.no_grad():
        model.get_submodule("1").get_parameter("weight").copy_(torch.stack([torch.zeros(12), weight]))
    images, labels = torch.full((1, 3, 2, 2), 0.5), torch.tensor([1])
    expected = weight.sign() if norm == "linf" else weight / weight.norm()
    climb = AttackConfig(norm, 0.1, steps=20, step_size=0.1)
    step = AttackConfig(norm, 0.1, steps=1, random_start=False)
    for x in (pgd(model, images, labels, climb, Generator().manual_seed(0)), fgsm(model, images, labels, step)):
        # The worst iterate is kept, and near the optimum the loss is flat: to float32 many iterates are equal.
        assert torch.allclose(x.flatten(), 0.5 - 0.1 * expected, atol=2e-4)


def test_margin_sees_through_saturated_logits() -> None:
    """Logits 1e4 times larger give a cross-entropy gradient of exactly zero; the margin does not care."""
    model, (images, _) = make_model(scale=1e4), make_images(32)
    labels = own_labels(model, images)
    robust = {}
    for loss in LOSSES:
        attack = AttackConfig("linf", 0.05, steps=5, random_start=False, loss=loss)
        robust[loss] = accuracy(model, pgd(model, images, labels, attack), labels)
    assert max(robust["margin"], robust["dlr"]) < 0.5 < robust["ce"]


def test_l2_ascent_survives_gradients_whose_squares_underflow() -> None:
    grad = torch.randn(2, 3, 4, 4) * 1e-24
    ascent = NORMS["l2"].ascent(grad)
    assert torch.allclose(ascent.flatten(1).norm(dim=1), torch.ones(2), atol=1e-4)
    assert not NORMS["l2"].ascent(torch.zeros(2, 3, 4, 4)).any()


def snapshot(model: nn.Module) -> list[tuple[bytes, bool, bytes | None]]:
    def raw(tensor: Tensor | None) -> bytes | None:
        return None if tensor is None else tensor.detach().numpy().tobytes()

    return [(raw(p) or b"", p.requires_grad, raw(p.grad)) for p in model.parameters()]


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_as_it_was(training: bool) -> None:
    model = make_model().train(training)
    first, last = model.get_submodule("1"), model.get_submodule("4")
    first.eval()  # a module frozen on purpose stays frozen
    first.get_parameter("weight").requires_grad_(False)
    last.get_parameter("weight").grad = torch.ones(5, 32)
    before, modes = snapshot(model), [m.training for m in model.modules()]
    images, labels = make_images()
    with torch.no_grad():  # as the evaluation calls it
        pgd(model, images, labels, AttackConfig("l2", 0.5, steps=2))
    assert [m.training for m in model.modules()] == modes
    assert snapshot(model) == before


def test_the_model_is_left_as_it_was_after_an_exception() -> None:
    model = make_model().train()
    images, labels = make_images()
    with pytest.raises(RuntimeError):
        pgd(model, images[..., :5], labels, AttackConfig("l2", 0.5, steps=2))
    assert all(p.requires_grad for p in model.parameters())
    assert all(m.training for m in model.modules())


def test_a_generator_makes_it_deterministic_and_dropout_does_not_matter() -> None:
    model, (images, labels) = make_model().train(), make_images()
    attack = AttackConfig("l2", 0.5, steps=3)
    runs = [pgd(model, images, labels, attack, Generator().manual_seed(7)) for _ in "ab"]
    state = torch.get_rng_state()
    runs.append(pgd(model, images, labels, attack, Generator().manual_seed(8)))
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])
    assert torch.equal(state, torch.get_rng_state()), "the global random state is not the attack's to use"


def test_a_low_precision_model_gets_images_of_its_dtype() -> None:
    model, (images, labels) = make_model().bfloat16(), make_images()
    x = pgd(model, images, labels, AttackConfig("linf", 8 / 255, steps=2))
    assert x.dtype == torch.float32
    assert distance(x, images, "linf").max() <= 8 / 255 + ROUNDING


@pytest.mark.parametrize("norm", sorted(NORMS))
@pytest.mark.parametrize("stop_when_fooled", [False, True])
def test_with_a_generator_an_image_the_batch_does_not_matter(norm: str, stop_when_fooled: bool) -> None:
    model, (images, labels) = make_model().double(), make_images(12)
    images, eps = images.double(), {"linf": 0.02, "l2": 0.15}[norm]
    attack = AttackConfig(norm, eps, steps=3, restarts=2, loss="margin", stop_when_fooled=stop_when_fooled)

    def attacked(rows: list[int]) -> Tensor:
        draws = [Generator().manual_seed(100 + row) for row in rows]
        return attack.run(model, images[rows], labels[rows], draws)

    whole = attacked(list(range(12)))
    for rows in ([7], [11, 0, 4], list(range(11, -1, -1))):
        assert torch.allclose(attacked(rows), whole[rows], rtol=0, atol=OTHER_BATCH)
    assert not torch.allclose(attacked([3]), whole[[4]])


@pytest.mark.parametrize("norm", sorted(NORMS))
@pytest.mark.parametrize("an_image", [False, True])
@pytest.mark.parametrize("random_start", [False, True])
def test_stopping_at_the_first_point_that_fools_changes_no_outcome(
    norm: str, an_image: bool, random_start: bool
) -> None:
    model, (images, labels) = make_model().double(), make_images(64)
    images, eps = images.double(), {"linf": 0.02, "l2": 0.2}[norm]
    labels[8:] = own_labels(model, images)[8:]  # some are wrong from the start
    seen = []
    model.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))

    def attacked(stop: bool) -> Tensor:
        draws = [Generator().manual_seed(i) for i in range(64)] if an_image else Generator().manual_seed(0)
        attack = AttackConfig(
            norm, eps, 6, eps / 4, random_start, 3 if random_start else 1, "margin", stop_when_fooled=stop
        )
        return attack.run(model, images, labels, draws)

    whole, passes = attacked(False), sum(seen)
    seen.clear()
    stopped, fewer = attacked(True), sum(seen)
    survives = own_labels(model, whole) == labels
    assert 0.1 < survives.double().mean() < 0.9
    assert LOSSES["margin"](model(whole), labels).abs().min() > OTHER_BATCH, "a decision that rounding could turn"
    assert torch.equal(survives, own_labels(model, stopped) == labels)
    assert torch.allclose(whole[survives], stopped[survives], rtol=0, atol=OTHER_BATCH)
    wrong = own_labels(model, images) != labels
    assert torch.equal(stopped[wrong], images[wrong]), "what was wrong from the start is given back as it was"
    assert distance(stopped, images, norm).max() <= eps + ROUNDING
    assert fewer < 0.9 * passes


def test_stopping_on_a_model_that_everything_fools() -> None:
    model, (images, _) = make_model(), make_images()
    wrong = (own_labels(model, images) + 1) % 5
    attack = AttackConfig("l2", 0.1, steps=2, stop_when_fooled=True)
    assert torch.equal(pgd(model, images, wrong, attack), images)


def test_training_wants_the_last_iterate_and_stops_nowhere() -> None:
    model, (images, labels) = make_model(), make_images()
    runs = [
        AttackConfig("l2", 0.5, 3, stop_when_fooled=stop).run(
            model, images, labels, Generator().manual_seed(0), keep_worst=False
        )
        for stop in (False, True)
    ]
    assert torch.equal(*runs)


def test_dlr_is_its_equation_and_blind_to_scale_and_shift() -> None:
    """The DLR loss of Croce & Hein 2020 is -(z_y - max_{i != y} z_i)/(z_1 - z_3)."""
    logits, labels = torch.randn(20, 6, generator=Generator().manual_seed(0), dtype=torch.float64), torch.arange(20) % 6
    for z, y, found in zip(logits.tolist(), labels.tolist(), LOSSES["dlr"](logits, labels).tolist(), strict=True):
        first, _, third, *_ = sorted(z, reverse=True)
        assert found == pytest.approx(-(z[y] - max(z[:y] + z[y + 1 :])) / (first - third), abs=1e-9)
    assert torch.allclose(LOSSES["dlr"](1e3 * logits + 5, labels), LOSSES["dlr"](logits, labels), atol=1e-9)
    with pytest.raises(UserError, match="three classes"):
        LOSSES["dlr"](logits[:, :2], labels % 2)


def test_nonsense_is_refused() -> None:
    model, (images, labels) = make_model(), make_images()
    attack = AttackConfig("l2", 0.5, steps=1)
    with pytest.raises(UserError, match="belongs inside the model"):
        pgd(model, images * 4 - 2, labels, attack)
    with pytest.raises(ValueError, match="keep_worst"):
        pgd(model, images, labels, replace(attack, restarts=2), keep_worst=False)
    with pytest.raises(ValueError, match="one an image"):
        pgd(model, images, labels, attack, [Generator()])
    with pytest.raises(ValueError, match="FGSM takes one step"):
        fgsm(model, images, labels, replace(attack, steps=2))
    with pytest.raises(UserError, match="random_start"):
        AttackConfig(restarts=2, random_start=False)
    for wrong in ({"norm": "l3"}, {"eps": -1}, {"eps": float("nan")}, {"steps": 0}, {"step_size": 0.0}, {"loss": "x"}):
        with pytest.raises(UserError, match=r"is invalid|no loss"):
            AttackConfig(**wrong)


def test_config_runs_the_same_attack() -> None:
    model, (images, labels) = make_model(), make_images()
    config = AttackConfig(norm="l2", eps=0.5, steps=3, restarts=2, loss="margin")
    direct = pgd(model, images, labels, config, Generator().manual_seed(2))
    assert torch.equal(direct, config.run(model, images, labels, Generator().manual_seed(2)))
    assert config.stronger(10).steps == 10
    assert config.stronger(2) is config


@pytest.mark.parametrize("step_size", [None, 0.01])
def test_a_share_of_an_attack_is_one_in_a_smaller_ball(step_size: float | None) -> None:
    whole = AttackConfig(norm="l2", eps=0.2, steps=4, step_size=step_size)
    assert whole.within(1.0) == whole
    half, none = whole.within(0.5), whole.within(0.0)
    assert (half.eps, half.step_size) == (0.1, step_size and 0.005)
    x, y = torch.rand(3, 1, 4, 4), torch.arange(3)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    assert torch.equal(none.run(model, x, y), x)
    assert 0.05 < float((half.run(model, x, y) - x).flatten(1).norm(dim=1).max()) <= 0.1 * (1 + 1e-6)
