"""Small models and batches for objectives, and the objectives as slow loops straight from their equations."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import zoo
from trainers.objectives import Probe
from trainers.settings import ObjectiveConfig
from zoo.models.convnet import ConvNet


def small_vit() -> nn.Module:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"embed_dim": 16, "depth": 1, "num_heads": 2, "patch_size": 4, "img_size": 8, "in_chans": 1}
    return zoo.create_model("dp_vit_ti", num_classes=5, global_pool="avg", init="orthogonal", **sizes)


def probe_of(model: nn.Module, progress: float = 1.0, name: str = "lmce", **settings: float) -> Probe:
    def through(measure: Any, *inputs: Any) -> Any:
        return measure(model, *inputs)

    def attack(images: Tensor, labels: Tensor) -> Tensor:
        raise AssertionError("no attack here")

    return Probe(through, attack, model, ObjectiveConfig(name, **settings), progress)


def batch(size: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.rand(size, 1, 8, 8, generator=generator), torch.randint(0, 5, (size,), generator=generator)


def slow_lmce(model: nn.Module, images: Tensor, labels: Tensor, eps: float) -> Tensor:
    """Compute the equation image by image, with central differences of the logits for the gradient."""
    losses, step = [], 1e-4
    for image, label in zip(images, labels.tolist(), strict=True):
        shifts = step * torch.eye(image.numel(), dtype=image.dtype).view(-1, *image.shape)
        jacobian = (model(image + shifts) - model(image - shifts)) / (2 * step)  # one row a pixel
        logits = model(image[None])[0]
        wrong = [k for k in range(len(logits)) if k != label]
        j = max(wrong, key=lambda k: float(logits[k].detach()))
        slope = (jacobian[:, label] - jacobian[:, j]).norm()
        z = torch.stack([logits[k] + (eps * slope if k != label else 0) for k in range(len(logits))])
        losses.append(-torch.log_softmax(z, 0)[label])
    return torch.stack(losses).mean()


STEP = 1e-4  # the step of central differences
Oracle = Callable[[nn.Module, Tensor, int, ObjectiveConfig], Tensor]


def gradient(model: nn.Module, image: Tensor, label: int, j: int) -> Tensor:
    shifts = STEP * torch.eye(image.numel(), dtype=image.dtype).view(-1, *image.shape)
    jacobian = (model(image + shifts) - model(image - shifts)) / (2 * STEP)  # one row a pixel
    return jacobian[:, label] - jacobian[:, j]


def runner_up(logits: Tensor, label: int) -> int:
    return max((k for k in range(len(logits)) if k != label), key=lambda k: float(logits[k].detach()))


def emma_of(model: nn.Module, image: Tensor, label: int, s: ObjectiveConfig) -> Tensor:
    z = model(image[None])[0]
    slope = gradient(model, image, label, runner_up(z, label)).norm()
    raised = []
    for k in range(len(z)):
        e = min(s.eps, max(0.0, float((z[label] - z[k]).detach())) / float(slope.detach()))
        raised.append(z[k] + (e * slope if k != label else 0))
    return -torch.log_softmax(torch.stack(raised), 0)[label]


def annealed_of(model: nn.Module, image: Tensor, label: int, s: ObjectiveConfig) -> Tensor:
    z = model(image[None])[0]
    shifted = torch.stack([z[k] - (s.offset if k == label else 0) for k in range(len(z))]) / s.temperature
    p = shifted.softmax(0)[label]
    return -s.temperature * (1 - p) ** s.gamma * p.log()


def curved_of(model: nn.Module, image: Tensor, label: int, s: ObjectiveConfig) -> Tensor:
    z = model(image[None])[0]
    j = runner_up(z, label)
    here = gradient(model, image, label, j)
    v = (here / here.norm()).detach().view(image.shape)
    bend = (gradient(model, image + s.eps * v, label, j) - here).norm()
    lost = s.eps * (here.norm() + s.curvature / 2 * bend)
    raised = torch.stack([z[k] + (lost if k != label else 0) for k in range(len(z))])
    return -torch.log_softmax(raised, 0)[label]


ORACLES: dict[str, Oracle] = {"emma": emma_of, "logit_annealing": annealed_of, "curvature": curved_of}


def conv_net() -> Any:
    """Return a network with active thresholds and a simple top singular value in each layer: its gradient is unique."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"layers": [(3, 3, 1, 1), (4, 4, 2, 1)], "hidden": [7], "theta": 0.4, "img_size": 8}
    model = ConvNet(num_classes=5, in_chans=1, mean=(0.4,), std=(0.25,), **options).double()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.add_(0.3 * torch.randn_like(weight) * (0.3 if "theta" in name else 1))
    return model
