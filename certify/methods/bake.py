"""The function that is certified: the model in eval mode, parametrisations folded, in float64.

Weights are folded in the precision they are served in and only then widened, so that the float64 function has exactly
the served weights (docs/proofs.md#served-weights).
"""

import torch
from torch import Tensor, nn

from certizoo import UserError
from zoo.layers.fold import folded
from zoo.layers.patches import Normalize

LOGIT_TOLERANCE = 1e-3  # margins of float32 logits against float64 ones, relative to 1 + |margin|, each to its own


def bake(model: nn.Module) -> nn.Module:
    """A float64 copy of `model` in eval mode without parametrisations and gradients. `model` stays as it is.

    Raises UserError for a model that is no one function, or none of numbers: see `_refuse`.
    """
    baked = folded(model).double().requires_grad_(False)
    _refuse(baked)
    return baked


def _refuse(baked: nn.Module) -> None:
    """Dropout that eval() does not switch off, weights or buffers that are not finite, a std that does not divide."""
    for name, module in baked.named_modules():
        if module.training:
            raise UserError(
                f"{name or 'the model'} ({type(module).__name__}) stays in training mode after eval(), so that dropout "
                "may be active; a certificate needs eval mode"
            )
        if isinstance(module, Normalize) and not bool((module.std > 0).all()):
            raise UserError(
                f"{name} divides by a std that is not above 0; set mean and std of the data in the model's config"
            )
    for name, tensor in [*baked.named_parameters(), *baked.named_buffers()]:
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise UserError(f"{name} holds NaN or infinite values; certify an earlier checkpoint or train again")


def logit_difference(model: nn.Module, baked: nn.Module, images_BCHW: Tensor) -> float:
    """max |served logits - baked logits| on these images. Raises UserError where the margins of the class that is
    predicted are not the same, image by image and class by class: huge logits of one excuse no other."""
    return float(logit_differences(model, baked, images_BCHW).max())


def logit_differences(
    model: nn.Module, baked: nn.Module, images_BCHW: Tensor, tolerance: float = LOGIT_TOLERANCE
) -> Tensor:
    """The same image by image: (B,)."""
    was_training = model.training
    model.eval()
    with torch.no_grad():
        dtype = next(model.parameters()).dtype
        served = model(images_BCHW.to(dtype)).double()
        exact = baked(images_BCHW.double())
    model.train(was_training)
    top_B1 = exact.argmax(-1, keepdim=True)
    margin_BJ, served_margin_BJ = (logits.gather(1, top_B1) - logits for logits in (exact, served))
    off_BJ = (served_margin_BJ - margin_BJ).abs()
    if not bool((off_BJ <= tolerance * (1 + margin_BJ)).all()):
        raise UserError(
            f"the baked float64 model does not reproduce the model's margins (off by {float(off_BJ.max()):.3g}); serve "
            "it in float32, look for huge offsets in biases, or for a module that behaves differently in eval mode"
        )
    return (served - exact).abs().amax(-1)
