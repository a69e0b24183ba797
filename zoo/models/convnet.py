"""CertViT's conv nets 4C3F, 6C2F, 8C2F (docs/references.md#certvit, Table 1) and the rules of their activations.

    images in [0,1] -> normalise -> (convolution, ReLU_theta) ... -> flatten -> (linear, ReLU_theta) ... -> linear

    ReLU_theta(x) = min(max(x, 0), theta),  theta learnable, one per entry (Huang et al. 2021).           No biases.

Letters: B images, C channels in, O out.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from certizoo import UserError
from zoo.bounds.activations import Hinge
from zoo.bounds.contracts import Bound, Expand, Expansion, Layer
from zoo.bounds.elementwise import elementwise
from zoo.bounds.hypotheses import Shapes
from zoo.bounds.rounding import exact_module
from zoo.bounds.rule_table import Links, ModuleRules, NoRule, register
from zoo.layers.init import orthogonal_init_
from zoo.layers.patches import Normalize

ConvSize = tuple[int, int, int, int]  # channels out, kernel size, stride, zero padding


class ReLUx(nn.Module):
    """min(max(x, 0), theta), theta of the shape of one image's activations. (B, *shape) -> (B, *shape).

    `theta` gives its first value.
    """

    def __init__(self, shape: Sequence[int], theta: float) -> None:
        super().__init__()
        self.shape = tuple(shape)
        self.theta = nn.Parameter(torch.full(self.shape, theta))

    def forward(self, x: Tensor) -> Tensor:
        return torch.minimum(x.relu(), self.theta)

    def extra_repr(self) -> str:
        return f"{self.shape}"


class ConvNet(nn.Module):
    """A conv net: images (B, C, H, W) in [0,1] -> logits (B, num_classes); methods named as in timm.

    Args:
        layers: the convolutions, (channels out, kernel size, stride, zero padding) each.
        hidden: widths of the linear layers before the head.
        theta: first value of the thresholds of ReLU_theta; None for plain ReLU. Their shapes follow img_size.
        img_size: side of the square image.
        in_chans: channels of the image.
        num_classes: number of logits.
        mean: mean of the pixels, per channel.
        std: standard deviation of the pixels, per channel.
        init: gives the weights their initial values.
    """

    def __init__(
        self,
        *,
        layers: Sequence[ConvSize],
        hidden: Sequence[int],
        theta: float | None,
        img_size: int,
        in_chans: int,
        num_classes: int,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        init: Callable[[nn.Module], None] = orthogonal_init_,
    ) -> None:
        super().__init__()

        def act(*shape: int) -> nn.Module:
            return nn.ReLU() if theta is None else ReLUx(shape, theta)

        self.num_classes, self.img_size, self.in_chans = num_classes, img_size, in_chans
        self.normalize = Normalize(mean, std)
        self.convs, self.fcs = nn.Sequential(), nn.Sequential(nn.Flatten())
        chans, size = in_chans, img_size
        for out, kernel, stride, padding in layers:
            size = (size + 2 * padding - kernel) // stride + 1
            if size < 1:
                raise UserError(f"img_size {img_size} is too small for {len(layers)} convolutions; enlarge it")
            self.convs.append(nn.Conv2d(chans, out, kernel, stride, padding, bias=False)).append(act(out, size, size))
            chans = out
        width = chans * size * size
        for out in hidden:
            self.fcs.append(nn.Linear(width, out, bias=False)).append(act(out))
            width = out
        self.head = nn.Linear(width, num_classes, bias=False)
        init(self)

    def forward_features(self, x_BCHW: Tensor) -> Tensor:
        """Return the activations of the last convolution: (B, C, H, W) -> (B, O, H', W')."""
        return self.convs(self.normalize(x_BCHW))

    def forward_head(self, x_BOHW: Tensor, pre_logits: bool = False) -> Tensor:
        """Map (B, O, H', W') to logits (B, num_classes), or to the last hidden layer."""
        hidden_BF = self.fcs(x_BOHW)
        return hidden_BF if pre_logits else self.head(hidden_BF)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x_BCHW))

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the linear head; there is no pooling to choose."""
        if global_pool is not None:
            raise UserError(f"global_pool is {global_pool!r}, but a conv net has no pooling; remove global_pool")
        self.num_classes = num_classes
        self.head = nn.Linear(self.head.in_features, num_classes, bias=False).to(self.head.weight)


def relux(module: ReLUx) -> Layer:
    """Return the rule: 0 <= sigma' <= 1."""

    def layer(x: Tensor) -> tuple[Tensor, Bound]:
        _refuse_broadcast(module, x)
        return module(x), lambda r: r

    return layer


def relux_expansion(module: ReLUx) -> Expand:
    """Expand with one unit per entry, with kinks at 0 and theta (`activations.Hinge`)."""
    expand = elementwise(module, Hinge(module.theta.detach().double().flatten()))

    def checked(x: Tensor) -> Expansion:
        _refuse_broadcast(module, x)
        return expand(x)

    return checked


def _refuse_broadcast(module: ReLUx, x: Tensor) -> None:
    """Refuse an input of another shape: one entry under many thresholds would become many."""
    if module.shape != tuple(x.shape[1:]):
        raise NoRule(module, f"its thresholds have the shape {module.shape}, but its input {tuple(x.shape[1:])}")


def convnet_trunk(module: ConvNet) -> tuple[Links, nn.Linear]:
    """Return everything up to the last hidden layer, and the linear head."""
    return (module.normalize, module.convs, module.fcs), module.head


def relux_shapes(module: ReLUx) -> Shapes:
    """Return one threshold per entry."""
    return {"theta": module.shape}


register(ReLUx, ModuleRules(rule=relux, expansion=relux_expansion, rounding=exact_module, shapes=relux_shapes))
register(ConvNet, ModuleRules(trunk=convnet_trunk))
