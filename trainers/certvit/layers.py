"""The layers that CertViT constrains: weights as matrices, inputs and outputs as rows.

    y = W x + b, W (O, I):   nn.Linear on tokens;   nn.Conv2d on the patches of its input, I = C k k

Legend: images_BCHW in [0,1], x_TI and y_TO rows (tokens or pixels of all images of a mini-batch), theta_TO thresholds.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from trainers.certvit.douglas_rachford import Rows
from zoo.attention.l2 import L2Attention
from zoo.layers.convolution import CellConv2d, conv_norm
from zoo.layers.patches import PatchProjection
from zoo.models.convnet import ReLUx
from zoo.spectral import sigma_upper

KINDS = (nn.Linear, nn.Conv2d, CellConv2d, PatchProjection)


def constrainable(model: nn.Module) -> list[str]:
    """Return the names of all linear layers and convolutions with free weights, in model order, head included."""
    return [
        name
        for name, module in model.named_modules()
        if type(module) in KINDS and not parametrize.is_parametrized(module)
    ]


@dataclass(frozen=True)
class LayerData:
    """Inputs and outputs of one layer, batch by batch, and the size of its output image (convolutions)."""

    rows: list[Rows]
    out_size: tuple[int, int]


@torch.no_grad()
def observe(model: nn.Module, name: str, images: Sequence[Tensor], count: int, seed: int) -> LayerData:
    """Record at most `count` random rows of each batch of images, in float64. The model is in eval mode and unchanged.

    W_V of L2 attention is never called, because its product with W_Q is formed first. It is constrained on the tokens
    that W_Q receives.
    """
    module, caught = model.get_submodule(name), []
    hook = model.get_submodule(_watched(model, name)).register_forward_hook(lambda m, x, y: caught.append((x[0], y)))
    with hook:
        for images_BCHW in images:
            model(images_BCHW)
    theta, weight = _threshold(model, name), module.get_parameter("weight").detach().flatten(1).double()
    bias = getattr(module, "bias", None)
    b = 0.0 if bias is None else bias.detach().double()
    generator = Generator().manual_seed(seed)
    found = []
    for x, y in caught:
        x_TI = _rows(module, x).double()
        chosen_T = torch.randperm(len(x_TI), generator=generator)[:count].to(x_TI.device)
        theta_TO = None if theta is None else _thresholds(theta, y)[chosen_T]
        found.append(Rows(x_TI[chosen_T], x_TI[chosen_T] @ weight.mT, theta_TO, b))
    height, width = caught[0][1].shape[2:] if isinstance(module, nn.Conv2d) else (1, 1)
    return LayerData(found, (int(height), int(width)))


def norm(module: nn.Module, out_size: tuple[int, int]) -> float:
    """Return an upper bound of the layer's norm, as certificates compute it."""
    weight = module.get_parameter("weight").detach()
    if isinstance(module, nn.Conv2d):
        return float(conv_norm(weight, (module.stride[0], module.stride[1]), out_size))
    return float(sigma_upper(weight))


def _watched(model: nn.Module, name: str) -> str:
    parent, _, leaf = name.rpartition(".")
    return f"{parent}.q" if leaf == "v" and isinstance(model.get_submodule(parent), L2Attention) else name


def _rows(module: nn.Module, x: Tensor) -> Tensor:
    if isinstance(module, nn.Conv2d):
        unfolded_BIL = F.unfold(x, module.kernel_size, module.dilation, module.padding, module.stride)  # type: ignore[arg-type]
        return unfolded_BIL.mT.flatten(0, 1)
    return x.flatten(0, -2)


def _threshold(model: nn.Module, name: str) -> Tensor | None:
    """Return theta of the ReLU or ReLU_theta directly after the layer; None if there is none.

    GELU is not a proximity operator, so layers before it are constrained on their own outputs.
    """
    parent, _, index = name.rpartition(".")
    sequence = model.get_submodule(parent)
    if not (isinstance(sequence, nn.Sequential) and int(index) + 1 < len(sequence)):
        return None
    activation = sequence[int(index) + 1]
    if isinstance(activation, ReLUx):
        return activation.theta.detach().double()
    return torch.tensor(torch.inf, dtype=torch.float64) if isinstance(activation, nn.ReLU) else None


def _thresholds(theta: Tensor, y: Tensor) -> Tensor:
    """Expand theta of one image, (O, H, W) or (O,), to every row of y: (T, O)."""
    all_ = theta.expand(y.shape)
    return all_.flatten(2).mT.flatten(0, 1) if y.ndim == 4 else all_.flatten(0, -2)
