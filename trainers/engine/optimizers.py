"""The optimisers of training and the state each keeps per parameter.

Muon (Jordan et al. 2024): with g the gradient of a matrix,

    M <- mu M + (1 - mu) g,    W <- W - lr 0.2 max(out, in)^(1/2) U V^T,    U S V^T = M,

U V^T comes from five Newton-Schulz steps in bfloat16 (timm's; singular values between about 0.7 and 1.2 unless S is
tiny). This factor (Liu et al. 2025, arXiv:2502.16982) makes a step as long as one of AdamW, which updates all other
parameters, so one lr serves both.
"""

from collections.abc import Collection, Iterator
from typing import Any

import torch
from timm.optim import Muon, param_groups_layer_decay, param_groups_weight_decay
from torch import Tensor, nn

from trainers.settings import OptimizerConfig

ADAMW, MOMENTUM = ("exp_avg", "exp_avg_sq"), ("momentum_buffer",)
EPS = 1e-8  # AdamW's default in torch


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Return AdamW, SGD or Muon.

    Weight decay applies to parameters with at least two axes, except those in `model.no_weight_decay()`; to all
    parameters with optimizer.decay_all. With optimizer.layer_decay a group has the factor of its layer, `lr_scale`.
    """
    spared: Collection[str] = getattr(model, "no_weight_decay", tuple)()
    exempt = () if config.decay_all else spared
    groups = grouped(model, config, exempt)
    betas = (config.betas[0], config.betas[1])
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum)
    if config.name == "muon":
        matrices = {id(weight) for name, weight in model.named_parameters() if is_hidden_matrix(name, weight, spared)}
        return Muon(list(_apart(groups, matrices)), lr=config.lr, momentum=config.momentum, betas=betas)
    # The plain kernels pass through memory fifteen times, the fused kernel once.
    fused = all(parameter.device.type in ("cpu", "cuda") for parameter in model.parameters())
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, fused=fused)


def grouped(model: nn.Module, config: OptimizerConfig, exempt: Collection[str]) -> list[dict[str, Any]]:
    """Return the groups of parameters as timm makes them."""
    how = {"no_weight_decay_list": exempt, "weight_decay_exclude_1d": not config.decay_all}
    if config.layer_decay == 1:
        return list(param_groups_weight_decay(model, config.weight_decay, **how))
    return list(param_groups_layer_decay(model, config.weight_decay, layer_decay=config.layer_decay, **how))


def is_hidden_matrix(name: str, weight: nn.Parameter, spared: Collection[str]) -> bool:
    """Return True for the matrices that Muon updates: not the first or last layer, no vectors, no position tables."""
    return weight.ndim == 2 and name not in spared and not name.startswith(("patch_embed.", "head."))


def kept_of(optimizer: torch.optim.Optimizer, weight: Tensor | None) -> tuple[str, ...]:
    """Return the names of the state tensors kept for this weight; none if another rank updates it."""
    if isinstance(optimizer, torch.optim.SGD):
        return MOMENTUM if optimizer.defaults["momentum"] else ()
    turned = (group["params"] for group in optimizer.param_groups if group.get("use_muon"))
    return MOMENTUM if any(weight is other for weights in turned for other in weights) else ADAMW


def _apart(groups: list[dict[str, Any]], matrices: set[int]) -> Iterator[dict[str, Any]]:
    """Split each group into Muon's matrices and the rest; skip empty groups."""
    for group in groups:
        for turned in (True, False):
            chosen = [weight for weight in group["params"] if (id(weight) in matrices) == turned]
            if chosen:
                yield group | {"params": chosen, "use_muon": turned} | ({} if turned else {"eps": EPS})
