"""Checks on other libraries' images: nothing leaves ball and box, and images that do not fool are returned unchanged.

Legend: B batch, C channels, H W pixels, K classes.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from certizoo.attacks.norms import NORMS, distance
from certizoo.inputs import extremes, require_classes

ROUNDING = 1e-6  # relative: float32's rounding of eps


def inside(found_BCHW: Tensor, images_BCHW: Tensor, norm: str, eps: float) -> Tensor:
    """Return found_BCHW in [0,1] and within eps of the images, of their dtype; points already inside stay exact."""
    found_BCHW = boxed(found_BCHW, images_BCHW)
    far_B = distance(found_BCHW, images_BCHW, norm) > eps * (1 + ROUNDING)
    projected_BCHW = images_BCHW + NORMS[norm].project(found_BCHW - images_BCHW, eps)
    return torch.where(far_B[:, None, None, None], projected_BCHW.clamp(0, 1), found_BCHW)


def boxed(found_BCHW: Tensor, images_BCHW: Tensor) -> Tensor:
    """Return found_BCHW in [0,1], of the images' dtype; pixels that are not finite become the image's."""
    found_BCHW = found_BCHW.detach().to(images_BCHW)
    return torch.where(found_BCHW.isfinite(), found_BCHW, images_BCHW).clamp(0, 1)


class Forward(nn.Module):
    """images_BCHW -> logits_BK in float32, as other libraries need it, for a model of any dtype."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.dtype = next((parameter.dtype for parameter in model.parameters()), torch.float32)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return self.model(x_BCHW.to(self.dtype)).float()


@torch.no_grad()
def classes_of(forward: Callable[[Tensor], Tensor], x_BCHW: Tensor, labels_B: Tensor) -> int:
    """Return the model's number of classes. Raises UserError for labels that are none of them."""
    classes = forward(x_BCHW[:1]).shape[1]
    require_classes(*extremes(labels_B), classes)
    return classes


@torch.no_grad()
def fooled(forward: Callable[[Tensor], Tensor], x_BCHW: Tensor, labels_B: Tensor) -> Tensor:
    """Return fooled_B, True for images classified differently from their label."""
    return forward(x_BCHW).argmax(dim=1) != labels_B
