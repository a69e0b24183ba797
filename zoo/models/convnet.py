"""CertViT's conv nets 4C3F, 6C2F, 8C2F (docs/references.md#certvit, Table 1) and the rules of their activations.

    images in [0,1] -> normalise -> (convolution, ReLU_theta) ... -> flatten -> (linear, ReLU_theta) ... -> linear

    ReLU_theta(x) = min(max(x, 0), theta),  theta learnable, one per entry (Huang et al. 2021).           No biases.

Letters: B images, C channels in, O out.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from timm.models import checkpoint_seq
from timm.models._features import feature_take_indices
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

    grad_checkpointing = False  # `set_grad_checkpointing`

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

        self.num_classes, self.in_chans = num_classes, in_chans
        self.normalize = Normalize(mean, std)
        self.convs, self.fcs = nn.Sequential(), nn.Sequential(nn.Flatten())
        self.feature_info: list[dict[str, Any]] = []
        chans, reduction = in_chans, 1
        for (out, kernel, stride, padding), size in zip(layers, sides(layers, img_size), strict=True):
            if size < 1:
                raise UserError(f"img_size {img_size} is too small for {len(layers)} convolutions; enlarge it")
            self.convs.append(nn.Conv2d(chans, out, kernel, stride, padding, bias=False)).append(act(out, size, size))
            chans, reduction = out, reduction * stride
            module = f"convs.{len(self.convs) - 1}"
            self.feature_info.append({"module": module, "num_chs": out, "reduction": reduction})
        self.num_features = chans
        width = chans * size * size
        for out in hidden:
            self.fcs.append(nn.Linear(width, out, bias=False)).append(act(out))
            width = out
        self.head_hidden_size = width
        self.head = nn.Linear(width, num_classes, bias=False)
        init(self)

    def forward_features(self, x_BCHW: Tensor) -> Tensor:
        """Return the activations of the last convolution: (B, C, H, W) -> (B, O, H', W')."""
        x_BCHW = self.normalize(x_BCHW)
        return checkpoint_seq(self.convs, x_BCHW, every=2) if self.grad_checkpointing else self.convs(x_BCHW)

    def forward_intermediates(
        self,
        x_BCHW: Tensor,
        indices: int | Sequence[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> Any:
        """Return the activations of the last convolution and a list of those of the chosen ones, as timm's models do.

        There is no `norm` to apply, and no other format than NCHW.
        """
        if output_fmt != "NCHW":
            raise UserError(f"output_fmt is {output_fmt!r}, but a conv net has no tokens; choose 'NCHW'")
        taken, last = feature_take_indices(len(self.feature_info), indices)
        x_BCHW, states = self.normalize(x_BCHW), list[Tensor]()
        for module in [*self.convs][: 2 * last + 2 if stop_early else None]:
            x_BCHW = module(x_BCHW)
            states.append(x_BCHW)
        found = [states[2 * i + 1] for i in sorted(set(taken))]
        return found if intermediates_only else (x_BCHW, found)

    def forward_head(self, x_BOHW: Tensor, pre_logits: bool = False) -> Tensor:
        """Map (B, O, H', W') to logits (B, num_classes), or to the last hidden layer."""
        hidden_BF = self.fcs(x_BOHW)
        return hidden_BF if pre_logits else self.head(hidden_BF)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x_BCHW))

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the linear head, or remove it (0 classes); there is no pooling to choose."""
        if global_pool is not None:
            raise UserError(f"global_pool is {global_pool!r}, but a conv net has no pooling; remove global_pool")
        self.num_classes = num_classes
        head: Any = nn.Linear(self.head_hidden_size, num_classes, bias=False) if num_classes else nn.Identity()
        self.head = head.to(next(self.parameters()))

    def get_classifier(self) -> nn.Module:
        """Return the linear head."""
        return self.head

    def no_weight_decay(self) -> set[str]:
        """Return the parameters that weight decay skips, in addition to those of one axis: none."""
        return set()

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return the patterns by which timm's optimisers group parameters."""
        return {"stem": r"^convs\.0\.", "blocks": [(r"^convs\.(\d+)", None), (r"^fcs", (99999,))]}

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute every convolution in the backward pass, and keep only its input."""
        self.grad_checkpointing = enable


def sides(layers: Sequence[ConvSize], size: int) -> Iterator[int]:
    """Yield the side of the activations of every convolution for images of this side."""
    for _, kernel, stride, padding in layers:
        size = (size + 2 * padding - kernel) // stride + 1
        yield size


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
