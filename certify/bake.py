"""The function that is certified: the model in eval mode, parametrisations folded, in float64.

Weights are folded in the precision they are served in and only then widened, so that the float64 function has exactly
the served weights (MATH-PROOFS.md section 3).
"""

import torch
from torch import Tensor, nn

from certizoo import UserError
from zoo.fold import folded

LOGIT_TOLERANCE = 1e-3  # float32 logits against float64 ones, relative to 1 + max |logit|


def bake(model: nn.Module) -> nn.Module:
    """A float64 copy of `model` in eval mode without parametrisations and gradients. `model` stays as it is."""
    return folded(model).double().requires_grad_(False)


def logit_difference(model: nn.Module, baked: nn.Module, images_BCHW: Tensor) -> float:
    """max |served logits - baked logits| on these images. Raises UserError where the two are not one function."""
    was_training = model.training
    model.eval()
    with torch.no_grad():
        dtype = next(model.parameters()).dtype
        served = model(images_BCHW.to(dtype)).double()
        exact = baked(images_BCHW.double())
    model.train(was_training)
    difference = float((served - exact).abs().max())
    if not difference <= LOGIT_TOLERANCE * (1 + float(exact.abs().max())):
        raise UserError(
            f"the baked float64 model does not reproduce the model's logits (they differ by {difference:.3g}); "
            "serve it in float32, or look for a module that behaves differently in eval mode"
        )
    return difference
