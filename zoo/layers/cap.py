"""Spectral caps: ||W||_2 <= c by rescaling, as a torch parametrisation.

    W_eff = W min(1, c / sigma(W)),   sigma by one power iteration a training step (an estimate from below).

A forward pass in training updates the vectors of the iteration. All but one of the passes of a step run within
`caps_still`, so all of them see the same caps.

The cap steers training. No certificate trusts it: certificates measure the folded W_eff with `sigma_upper`.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from zoo.bounds.rule_table import ModuleRules, register
from zoo.spectral import power_step, settled, start_vectors


class SpectralCap(nn.Module):
    """Caps for k stacked blocks of rows of one weight: W (k m, n), caps c_k (infinite = free).

    The vectors of the power iteration are persistent buffers, so every checkpoint holds them.
    """

    caps_K: Tensor
    v_KN: Tensor

    def __init__(self, caps: Sequence[float], in_features: int) -> None:
        super().__init__()
        self.register_buffer("caps_K", torch.tensor(caps, dtype=torch.float32), persistent=False)
        self.register_buffer("v_KN", start_vectors(len(caps), in_features))
        self.still = False

    def forward(self, weight: Tensor) -> Tensor:
        blocks = self.stacked(weight)
        sigma_K, v_KN = power_step(blocks, self.v_KN.float())
        if self.training and torch.is_grad_enabled() and not self.still:
            self.v_KN.copy_(v_KN)
        excess_K = (sigma_K / self.caps_K.float()).clamp_min(1)  # sigma / inf = 0: a free block stays as it is
        return (blocks / excess_K[:, None, None]).to(weight.dtype).reshape(weight.shape)

    def stacked(self, weight: Tensor) -> Tensor:
        """Return W (k m, ...) as (k, m, n), float32."""
        return weight.flatten(1).unflatten(0, (len(self.caps_K), -1)).float()


register(SpectralCap, ModuleRules())  # certified models are folded


@contextmanager
def caps_still(model: nn.Module) -> Iterator[None]:
    """Keep the vectors of the caps unchanged in forward passes within this context."""
    moving = [module for module in model.modules() if isinstance(module, SpectralCap) and not module.still]
    for cap in moving:
        cap.still = True
    try:
        yield
    finally:
        for cap in moving:
            cap.still = False


@torch.no_grad()
def settle_caps_(model: nn.Module) -> None:
    """Run power iterations for weights that no step has seen yet, such as pretrained ones."""
    for module in model.modules():
        if isinstance(module, parametrize.ParametrizationList):
            for cap in module:
                if isinstance(cap, SpectralCap):
                    cap.v_KN.copy_(settled(cap.stacked(module.original), cap.v_KN.float()))


def cap_(module: nn.Module, caps: Sequence[float | None]) -> None:
    """Give `module.weight` (k m, ...) a cap per block of rows and start on it (orthogonal, scaled); None means no cap.

    Blocks without a cap keep their initial values.
    """
    weight = module.weight
    assert isinstance(weight, nn.Parameter)
    limits = [math.inf if cap is None else cap for cap in caps]
    if all(math.isinf(limit) for limit in limits):
        return
    with torch.no_grad():
        for block, limit in zip(weight.flatten(1).chunk(len(limits)), limits, strict=True):
            if math.isfinite(limit):
                nn.init.orthogonal_(block, gain=limit)
    cap = SpectralCap(limits, weight.flatten(1).shape[1])
    # unsafe skips torch's trial pass, which would update the vectors, and takes seconds for a model of hundreds of
    # blocks on the meta device.
    parametrize.register_parametrization(module, "weight", cap, unsafe=True)
