"""CertViT's convolutional networks: parameter counts, and their layers written out."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from certify import certified_radius
from certify.shared.bake import bake
from certizoo import UserError
from tests.tools.ascent import ascend, largest_change
from tests.tools.cases import mostly_slow
from zoo.bounds.first_order import layer_of
from zoo.models.convnet import ConvNet, ReLUx

# CertViT, Table 1.
PUBLISHED = {
    "conv_4c3f_mnist": (1973536, (1, 28), 10),
    "conv_4c3f": (2528096, (3, 32), 10),
    "conv_6c2f": (2360672, (3, 32), 10),
    "conv_8c2f": (2436864, (3, 32), 100),
    "conv_8c2f_tin": (5257984, (3, 64), 200),
}
TINY: dict[str, Any] = {
    "layers": [(3, 3, 1, 1), (4, 4, 2, 1), (4, 3, 2, 0)],
    "hidden": [7],
    "theta": 0.7,
    "img_size": 9,
    "num_classes": 4,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_ones(name: str) -> None:
    count, (chans, size), classes = PUBLISHED[name]
    with torch.device("meta"):
        model = zoo.create_model(name)
        assert sum(p.numel() for p in model.parameters()) == count
        assert model(torch.empty(2, chans, size, size)).shape == (2, classes)
    assert not any(key.endswith("bias") for key in model.state_dict())


def tiny(seed: int = 0, **options: Any) -> Any:
    torch.manual_seed(seed)
    return zoo.create_model("conv_4c3f", **(TINY | options)).eval()


def slow_conv(x_CHW: Tensor, w_OCkk: Tensor, stride: int, padding: int) -> Tensor:
    """sum_{c, a, b} W[o, c, a, b] x[c, i s + a - p, j s + b - p], zero outside the image."""
    chans_out, chans, k, _ = w_OCkk.shape
    size = x_CHW.shape[1]
    n = (size + 2 * padding - k) // stride + 1
    y = torch.zeros(chans_out, n, n, dtype=torch.float64)
    for o, i, j, c, a, b in product(range(chans_out), range(n), range(n), range(chans), range(k), range(k)):
        row, column = i * stride + a - padding, j * stride + b - padding
        if 0 <= row < size and 0 <= column < size:
            y[o, i, j] += w_OCkk[o, c, a, b] * x_CHW[c, row, column]
    return y


def test_the_model_equals_its_layers_written_out() -> None:
    """Normalise, convolve, clamp to [0, theta], flatten, linear: one image, slow loops, float64."""
    model = tiny(img_size=7).double().requires_grad_(False)
    for module in model.modules():
        if isinstance(module, ReLUx):
            module.theta.uniform_(0.1, 1.0)
    x = torch.rand(1, 3, 7, 7, dtype=torch.float64)
    mean, std = model.normalize.mean, model.normalize.std
    h = (x[0] - mean) / std
    for (_, _, stride, padding), conv, act in zip(TINY["layers"], model.convs[::2], model.convs[1::2], strict=True):
        y = slow_conv(h, conv.weight, stride, padding)
        h = torch.where(y < 0, torch.zeros_like(y), torch.where(y > act.theta, act.theta, y))
    _, fc, act = model.fcs
    y = fc.weight @ h.flatten()
    h = torch.where(y < 0, torch.zeros_like(y), torch.where(y > act.theta, act.theta, y))
    torch.testing.assert_close(model(x)[0], model.head.weight @ h)


def test_thresholds_follow_the_image_size_and_learn() -> None:
    thetas = [tuple(m.theta.shape) for m in tiny(img_size=12).modules() if isinstance(m, ReLUx)]
    assert thetas == [(3, 12, 12), (4, 6, 6), (4, 2, 2), (7,)]
    assert not any(isinstance(m, ReLUx) for m in tiny(theta=None).modules())
    act = ReLUx((3,), 0.5)
    x = torch.tensor([[-1.0, 0.2, 0.9]], requires_grad=True)
    y = act(x)
    assert torch.equal(y, torch.tensor([[0.0, 0.2, 0.5]]))
    g_x, g_theta = torch.autograd.grad(y.sum(), (x, act.theta))
    assert g_x.tolist() == [[0.0, 1.0, 0.0]]
    assert g_theta.tolist() == [0.0, 0.0, 1.0]


def test_timms_methods() -> None:
    model = tiny()
    x = torch.rand(2, 3, 9, 9)
    features = model.forward_features(x)
    assert features.shape == (2, 4, 1, 1)
    assert torch.equal(model.forward_head(features), model(x))
    assert model.forward_head(features, pre_logits=True).shape == (2, 7)
    model.reset_classifier(6)
    assert model(x).shape == (2, 6)
    with pytest.raises(UserError, match="pooling"):
        model.reset_classifier(6, "avg")
    with pytest.raises(UserError, match="too small"):
        tiny(img_size=4)


# certificates --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("theta", mostly_slow((None, 0.7), 0.7))
def test_no_attack_beats_the_certified_radius(theta: float | None) -> None:
    certified = 0
    for seed in range(10):
        model = tiny(seed, theta=theta, hidden=[7, 5])
        x = torch.rand(16, 3, 9, 9)
        with torch.no_grad():
            label = model(x).argmax(-1)
        radius_B = certified_radius(model, x, label, "lofast")
        certified += int((radius_B > 1e-5).sum())
        baked = bake(model)

        def loss(z: Tensor, baked: nn.Module = baked, label: Tensor = label) -> Tensor:
            logits, own = baked(z), label[:, None].repeat(len(z) // len(label), 1)
            return logits.scatter(1, own, -torch.inf).amax(1) - logits.gather(1, own).squeeze(1)

        found_B = ascend(loss, x.double(), radius_B, steps=40, starts=2)
        assert (found_B <= 0)[radius_B > 0].all()
    assert certified >= 80, "too little was certified for the test to mean anything"


def test_no_ascent_beats_the_trunk() -> None:
    """Compare the chain of rules, from the normalised image on, with the change of the last hidden layer."""
    for seed in range(5):
        model = bake(tiny(seed))
        assert isinstance(model, ConvNet)
        trunk = nn.Sequential(model.normalize, model.convs, model.fcs)
        x, r = torch.rand(20, 3, 9, 9, dtype=torch.float64), torch.full((20,), 0.1, dtype=torch.float64)
        y, bound = layer_of(trunk)(x)
        torch.testing.assert_close(y, trunk(x))
        ratio = float((largest_change(trunk, x, r) / bound(r)).max())
        assert 0.02 < ratio <= 1
