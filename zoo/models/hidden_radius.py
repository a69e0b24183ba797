"""A radius of the last hidden layer of a conv net, differentiable and for training only: norms are estimates.

For images moved by at most eps, h_l = act(W_l h_{l-1}), and D_l the diagonal 0/1 matrix of the entries of h_l that can
change at all,

    ||h_l' - h_l|| <= r_l = || D_l W_l D_{l-1} || r_{l-1},      r_0 = eps / min std,   |act'| <= 1        (local)
    r_l = ||W_l|| r_{l-1}                                                                                 (global)

An entry y_i = (W_l h_{l-1})_i moves by at most || (W_l D_{l-1})_i || r_{l-1}; where it stays below 0, or above theta,
h_l does not change (Huang et al. 2021, https://arxiv.org/abs/2111.01395, section 3). The norms come from power
iterations, below the truth: certificates have their own rules (zoo/models/convnet.py).

The paper's loss makes more entries constant. With U = y + way and L = y - way for a value that moves by at most `way`,
it is

    mean over entries and layers of  max(0, U_i) + max(0, theta_i - L_i)     (ReLU: the first term)

Letters: B images, C channels, H x W pixels, F units of the last hidden layer, K classes; u, v singular vectors.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.grad import conv2d_input

from certizoo import UserError
from zoo.models.convnet import ConvNet, ReLUx
from zoo.spectral import start_vectors

ITERATIONS = 10  # from a fixed start on one image-sized vector; cheap compared with a batch
LOCAL_ITERATIONS = 2  # additional ones for each image, starting where the shared ones ended


def check_reach(model: nn.Module) -> None:
    """Raise UserError for a model whose reach is not known."""
    if type(model) is not ConvNet:
        raise UserError(
            f"{type(model).__name__} has no global Lipschitz constant that can be trained for; use a model conv_*, or "
            "another objective"
        )


@dataclass(frozen=True)
class HiddenRadius:
    """Logits, the radius r of the last hidden layer, the diagonal of its D, and the sparsity loss.

    The diagonal is all ones for global bounds. The loss makes more entries constant; it is 0 for global bounds.
    """

    logits_BK: Tensor
    radius_B: Tensor
    moving_BF: Tensor
    sparsity_B: Tensor


def reach(model: ConvNet, images_BCHW: Tensor, eps: float, local: bool) -> HiddenRadius:
    """Return logits, radius and sparsity, differentiable in the weights (`way` counts as a constant).

    Raises UserError for another model. Proof: docs/proofs.md#reach.
    """
    check_reach(model)
    h = model.normalize(images_BCHW)
    r_B, d = h.new_full((len(h),), eps) / model.normalize.std.min(), torch.ones_like(h)
    layers = [module for module in (*model.convs, *model.fcs) if not isinstance(module, nn.Flatten)]
    sparsity_B = torch.zeros_like(r_B)
    for affine, activation in zip(layers[::2], layers[1::2], strict=True):
        if isinstance(affine, nn.Linear):
            h, d = h.flatten(1), d.flatten(1)
        w = Map.of(affine, h)
        y = w(h)
        d_out = torch.ones_like(y)
        if local:
            way = w.rows(d) * _like(r_B.detach(), y)
            d_out = _moving(activation, y.detach(), way)
            sparsity_B = sparsity_B + _hinge(activation, y, way).flatten(1).mean(1) / (len(layers) // 2)
        r_B = r_B * w.norm(d, d_out, local)
        h, d = activation(y), d_out
    return HiddenRadius(model.head(h), r_B, d, sparsity_B)


def _moving(activation: nn.Module, y: Tensor, way: Tensor) -> Tensor:
    """Return 1 where a value within `way` of y can change the activation."""
    moving = y + way > 0
    if isinstance(activation, ReLUx):
        moving &= y - way < activation.theta
    return moving.to(y.dtype)


def _hinge(activation: nn.Module, y: Tensor, way: Tensor) -> Tensor:
    """Return max(0, U) + max(0, theta - L)."""
    rising = (y + way).clamp_min(0)
    return rising + (activation.theta - y + way).clamp_min(0) if isinstance(activation, ReLUx) else rising


def _like(value_B: Tensor, x: Tensor) -> Tensor:
    return value_B.view(-1, *[1] * (x.ndim - 1))


def _unit(x: Tensor) -> Tensor:
    return F.normalize(x.flatten(1), dim=1).view_as(x)


@dataclass(frozen=True)
class Map:
    """The matrix W of a convolution or linear layer (stride 0) on inputs of one shape, and its adjoint."""

    weight: Tensor
    shape: torch.Size
    stride: int
    padding: int

    @staticmethod
    def of(module: nn.Module, h: Tensor) -> "Map":
        weight = module.get_parameter("weight")
        if isinstance(module, nn.Conv2d):
            return Map(weight, h.shape[1:], module.stride[0], int(module.padding[0]))
        return Map(weight, h.shape[1:], 0, 0)

    def __call__(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight, None, self.stride, self.padding) if self.stride else x @ self.weight.mT

    def adjoint(self, y: Tensor) -> Tensor:
        if not self.stride:
            return y @ self.weight
        size = (len(y), *self.shape)
        return conv2d_input(size, self.weight, y, self.stride, self.padding)

    def rows(self, d: Tensor) -> Tensor:
        """Return ||(W D)_i|| for every output i, of the shape of outputs; without gradient."""
        return replace(self, weight=self.weight.detach().square())(d).clamp_min(0).sqrt()

    def norm(self, d_in: Tensor, d_out: Tensor, local: bool) -> Tensor:
        """Return ||D_out W D_in|| (B,) or, for D = I, ||W|| (1,). Differentiable in W."""
        with torch.no_grad():
            v = start_vectors(1, d_in[0].numel()).to(d_in).view(1, *self.shape)
            for _ in range(ITERATIONS):
                u = _unit(self(v))
                v = _unit(self.adjoint(u))
            for _ in range(LOCAL_ITERATIONS if local else 0):
                u = _unit(d_out * self(d_in * v))
                v = _unit(d_in * self.adjoint(u))
        return (u * self(v)).flatten(1).sum(1)
