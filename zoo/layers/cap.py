"""Spectral caps: ||W||_2 <= c by rescaling, as a torch parametrisation.

    W_eff = W min(1, c / sigma(W)),   sigma by one power iteration a training step (an estimate from below).

The cap steers the training. No certificate trusts it: certificates measure the folded W_eff with `sigma_upper`.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from zoo.bounds.facts import Facts, register
from zoo.spectral import power_step, start_vectors


class SpectralCap(nn.Module):
    """Caps for k stacked blocks of rows of one weight: W (k m, n), caps c_k (infinite = free).

    The vectors of the power iteration are persistent buffers: they travel with every checkpoint.
    """

    caps_K: Tensor
    v_KN: Tensor

    def __init__(self, caps: Sequence[float], in_features: int) -> None:
        super().__init__()
        self.register_buffer("caps_K", torch.tensor(caps, dtype=torch.float32), persistent=False)
        self.register_buffer("v_KN", start_vectors(len(caps), in_features))

    def forward(self, weight: Tensor) -> Tensor:
        blocks = weight.flatten(1).unflatten(0, (len(self.caps_K), -1)).float()
        sigma_K, v_KN = power_step(blocks, self.v_KN.float())
        if self.training and torch.is_grad_enabled():
            self.v_KN.copy_(v_KN)
        excess_K = (sigma_K / self.caps_K.float()).clamp_min(1)  # sigma / inf = 0: a free block stays as it is
        return (blocks / excess_K[:, None, None]).to(weight.dtype).reshape(weight.shape)


register(SpectralCap, Facts())  # certified models are folded


def cap_(module: nn.Module, caps: Sequence[float | None]) -> None:
    """Give `module.weight` (k m, ...) a cap per block of rows and start on it (orthogonal, scaled); None is no cap.

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
    parametrize.register_parametrization(module, "weight", SpectralCap(limits, weight.flatten(1).shape[1]))
