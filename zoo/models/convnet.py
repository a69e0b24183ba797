"""CertViT's conv nets 4C3F, 6C2F, 8C2F (docs/references.md#certvit, Table 1) and the rule of their layers.

    images in [0,1] -> normalise -> (convolution, ReLU_theta) ... -> flatten -> (linear, ReLU_theta) ... -> linear

    ReLU_theta(x) = min(max(x, 0), theta),  theta learnable, one per entry (Huang et al. 2021).           No biases.

Letters: B images, C channels in, O out, k kernel size, s stride, p zero padding.
"""

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from certizoo import UserError
from zoo.arithmetic import U
from zoo.bounds.activations import Hinge
from zoo.bounds.contracts import Bound, Expand, Expansion, Layer
from zoo.bounds.curvature import affine
from zoo.bounds.elementwise import elementwise
from zoo.bounds.facts import Facts, Links, NoRule, register
from zoo.layers.init import orthogonal_init_
from zoo.layers.patches import Normalize
from zoo.spectral import sigma_upper

ConvSize = tuple[int, int, int, int]  # channels out, kernel size, stride, zero padding


class ReLUx(nn.Module):
    """min(max(x, 0), theta), theta of the shape of one image's activations. (B, *shape) -> (B, *shape).

    Args: theta: its first value.
    """

    def __init__(self, shape: Sequence[int], theta: float) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.full(tuple(shape), theta))

    def forward(self, x: Tensor) -> Tensor:
        return torch.minimum(x.relu(), self.theta)

    def extra_repr(self) -> str:
        return f"{tuple(self.theta.shape)}"


class ConvNet(nn.Module):
    """Images (B, C, H, W) in [0,1] -> logits (B, num_classes); methods named as in timm.

    Args:
        layers: the convolutions, (channels out, kernel size, stride, zero padding) each.
        hidden: widths of the linear layers before the head.
        theta: first value of the thresholds of ReLU_theta; None for plain ReLU. Their shapes follow img_size.
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
        """Activations of the last convolution: (B, C, H, W) -> (B, O, H', W')."""
        return self.convs(self.normalize(x_BCHW))

    def forward_head(self, x_BOHW: Tensor, pre_logits: bool = False) -> Tensor:
        """(B, O, H', W') -> logits (B, num_classes), or the last hidden layer."""
        hidden_BF = self.fcs(x_BOHW)
        return hidden_BF if pre_logits else self.head(hidden_BF)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x_BCHW))

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """A fresh linear head; there is no pooling to choose."""
        if global_pool is not None:
            raise UserError("a conv net has no pooling; leave global_pool out")
        self.num_classes = num_classes
        self.head = nn.Linear(self.head.in_features, num_classes, bias=False).to(self.head.weight)


def conv_norm(weight: Tensor, stride: tuple[int, int], out_size: tuple[int, int]) -> Tensor:
    """A number never below the norm of a convolution with zero padding, as a map of whole images: weight (O, C, k, k),
    its stride and the height and width of its output -> scalar in float64.

    Write a = s b + t for the offsets a of the kernel, 0 <= t < s. The values x[c, s m + t] of the padded image, read as
    channels (c, t) at m (a permutation), go through a convolution with stride 1 and K = ceil(k / s) offsets b:

        y[o, i] = sum_{c, t, b} W[o, c, s b + t] x_(c,t)[i + b].

    With outputs i < n it is a submatrix of the circulant of any size L >= n + K - 1, whose norm is the largest of its
    symbols W^(w) = sum_b W_b e^(2 pi i w b / L) (docs/proofs.md#convolution). W is real: W^(-w) = conj W^(w), half of
    the grid is enough. Complex matrices are measured as [[Re, -Im], [Im, Re]], of the same norm.

    Rounding: a computed phase is off by less than 64 u in each part (two angles below 2 pi by 3 u of themselves, their
    sum, the cosine's ulp), a sum of J products by gamma_(J+2): W^ is off by at most 4 (J + 40) u || sum_b |W_b| ||_F.
    """
    w = _polyphase(weight.detach().double(), stride)
    *_, k_h, k_w = w.shape
    # With one offset the symbol is the same everywhere.
    l_h, l_w = (n + k - 1 if k > 1 else 1 for n, k in zip(out_size, (k_h, k_w), strict=True))
    v = torch.arange(l_h, device=w.device).repeat_interleave(l_w // 2 + 1)
    u = torch.arange(l_w // 2 + 1, device=w.device).repeat(l_h)
    phase_FK = (_angle(v, k_h, l_h)[:, :, None] + _angle(u, k_w, l_w)[:, None, :]).flatten(1)
    w_KOC = w.flatten(2).permute(2, 0, 1)
    norm = w.new_zeros(())
    for chunk_FK in phase_FK.split(max(1, 2**22 // (4 * w_KOC[0].numel()))):
        re = torch.einsum("fk,koc->foc", chunk_FK.cos(), w_KOC)
        im = torch.einsum("fk,koc->foc", chunk_FK.sin(), w_KOC)
        real = torch.cat([torch.cat([re, -im], 2), torch.cat([im, re], 2)], 1)
        norm = torch.maximum(norm, sigma_upper(real).max())
    rounding = 4 * (len(w_KOC) + 40) * U * w_KOC.abs().sum(0).square().sum().sqrt()
    return norm + rounding


def _polyphase(w: Tensor, stride: tuple[int, int]) -> Tensor:
    """(O, C, k, k) -> (O, C s s, K, K): the kernel on the image read at every s-th pixel."""
    s_h, s_w = stride
    w = F.pad(w, (0, -w.shape[3] % s_w, 0, -w.shape[2] % s_h))
    return w.unflatten(3, (-1, s_w)).unflatten(2, (-1, s_h)).permute(0, 1, 3, 5, 2, 4).flatten(1, 3)


def _angle(frequency_F: Tensor, offsets: int, length: int) -> Tensor:
    """2 pi w b / L in [0, 2 pi), the integer w b reduced exactly: (F, K)."""
    turns = frequency_F[:, None] * torch.arange(offsets, device=frequency_F.device) % length
    return 2 * math.pi * turns.double() / length


def conv2d(module: nn.Conv2d) -> Layer:
    """Affine, with a norm that depends on the size of the image: measured once per size."""
    if module.groups != 1 or module.dilation != (1, 1):
        raise NoRule(module, "convolutions are measured without groups and dilation")
    if isinstance(module.padding, str) or module.padding_mode != "zeros":
        raise NoRule(module, "convolutions are measured with zero padding given as a number")
    stride = (module.stride[0], module.stride[1])
    norms: dict[tuple[int, int], Tensor] = {}

    def layer(x_BCHW: Tensor) -> tuple[Tensor, Bound]:
        y_BOHW = module(x_BCHW)
        size = (y_BOHW.shape[2], y_BOHW.shape[3])
        if size not in norms:
            norms[size] = conv_norm(module.weight, stride, size)
        norm = norms[size]
        return y_BOHW, lambda r: norm * r

    return layer


def relux(module: ReLUx) -> Layer:
    """0 <= sigma' <= 1."""

    def layer(x: Tensor) -> tuple[Tensor, Bound]:
        _refuse_broadcast(module, x)
        return module(x), lambda r: r

    return layer


def relux_expansion(module: ReLUx) -> Expand:
    """One unit per entry, with kinks at 0 and theta (`activations.Hinge`)."""
    expand = elementwise(module, Hinge(module.theta.detach().double().flatten()))

    def checked(x: Tensor) -> Expansion:
        _refuse_broadcast(module, x)
        return expand(x)

    return checked


def _refuse_broadcast(module: ReLUx, x: Tensor) -> None:
    """One entry under many thresholds would become many."""
    if module.theta.shape != x.shape[1:]:
        raise NoRule(module, f"its thresholds are for {tuple(module.theta.shape)}, and it gets {tuple(x.shape[1:])}")


def convnet_trunk(module: ConvNet) -> tuple[Links, nn.Linear]:
    """Everything up to the last hidden layer, and the linear head."""
    return (module.normalize, module.convs, module.fcs), module.head


register(nn.Conv2d, Facts(rule=conv2d, expansion=affine))
register(ReLUx, Facts(rule=relux, expansion=relux_expansion))
register(ConvNet, Facts(trunk=convnet_trunk))
