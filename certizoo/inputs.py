"""Images, labels and radii as callers pass them to attacks, certificates and served models: each fault is one line.

Legend: B batch, C channels, H W pixels, K classes.
"""

import math

import torch
from torch import Tensor

from certizoo.errors import UserError
from certizoo.norms import LINF
from certizoo.text import shown

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
EXACT = (torch.float32, torch.float64)  # types whose images a certificate or a server takes
FLOATS = (*EXACT, torch.float16, torch.bfloat16)  # types of a training's images
UNIT = "pass them in [0,1] without normalisation, which belongs inside the model; images / 255 for bytes"


def batch_given(images_BCHW: Tensor, labels_B: Tensor) -> tuple[Tensor, Tensor]:
    """Return copies of both as plain tensors, the labels int64.

    Raises UserError unless they are a batch of images in [0,1] with one label each.
    """
    require_tensors(images=images_BCHW, labels=labels_B)
    with torch._C.DisableTorchFunctionSubclass():  # torchvision images and other tensor subclasses
        images, labels = (given.detach().as_subclass(Tensor).clone() for given in (images_BCHW, labels_B))
    _require_float(images, EXACT)
    _require_integers(labels)
    if images.ndim != 4 or labels.shape != images.shape[:1] or not images.numel():
        raise UserError(
            f"images must be (B, C, H, W) and labels (B,) with B >= 1; got {tuple(images.shape)} and "
            f"{tuple(labels.shape)}"
        )
    _require_unit(images)
    return images, labels.long()


def images_given(images_BCHW: Tensor, shape_CHW: tuple[int, int, int]) -> Tensor:
    """Return images as float32. Raises UserError unless they are a batch in [0,1] of this shape."""
    _require_float(images_BCHW, EXACT)
    if images_BCHW.ndim != 4 or tuple(images_BCHW.shape[1:]) != shape_CHW or not len(images_BCHW):
        wanted = ", ".join(map(str, shape_CHW))
        raise UserError(f"images have the shape {tuple(images_BCHW.shape)}; the model takes (B, {wanted}) with B >= 1")
    _require_unit(images_BCHW)
    return images_BCHW.float()


def labels_given(images_BCHW: Tensor, labels_B: Tensor, *, probabilities: bool = False) -> Tensor:
    """Return the labels of images that are attacked: int64, or probabilities labels_BK if the loss takes these.

    Raises UserError unless both are a batch, perhaps an empty one, in [0,1] with one label each. Their classes are
    compared with the model's by `require_classes`.
    """
    require_tensors(images=images_BCHW, labels=labels_B)
    _require_float(images_BCHW, FLOATS)
    mixed = probabilities and labels_B.ndim == 2 and labels_B.is_floating_point()
    if images_BCHW.ndim != 4 or labels_B.ndim != 1 + mixed or len(labels_B) != len(images_BCHW):
        fix = "labels.argmax(1) makes classes of one-hot labels" if labels_B.ndim == 2 else "pass one class an image"
        raise UserError(
            f"images must be (B, C, H, W) and labels (B,); got {tuple(images_BCHW.shape)} and "
            f"{tuple(labels_B.shape)}; {fix}"
        )
    _require_unit(images_BCHW)
    if mixed:
        return labels_B
    _require_integers(labels_B)
    return labels_B.long()


def extremes(labels_B: Tensor) -> tuple[int, int]:
    """Return the least and the largest class in labels, or in probabilities labels_BK."""
    if labels_B.ndim == 2:
        return 0, labels_B.shape[1] - 1
    least, largest = labels_B.aminmax() if len(labels_B) else (labels_B.new_zeros(()),) * 2
    return int(least), int(largest)


def require_classes(least: int, largest: int, classes: int) -> None:
    """Raise UserError unless labels between these are classes of the model, which has two or more."""
    if classes < 2:
        raise UserError(
            "the model has a single logit, so that its class never changes; return one logit for each class, such as "
            "(0, z) for yes or no"
        )
    if least < 0 or largest >= classes:
        wrong = least if least < 0 else largest
        raise UserError(
            f"labels must lie in 0..{classes - 1}, the model's classes, but one is {wrong}; correct the label, or use "
            "the model of these data"
        )


def require_radius(key: str, eps: float, norm: str) -> None:
    """Raise UserError for a radius in Linf whose ball holds every image, such as 8 instead of 8/255."""
    if norm == LINF and not eps <= 1:
        fix = f"set {key}={eps / 255:.4g} for {eps:g}/255" if eps < math.inf else "give a smaller radius"
        raise UserError(f"{key}={eps:g} is too large: pixels lie in [0,1], so this ball holds every image; {fix}")


def require_tensors(**given: Tensor) -> None:
    """Raise UserError for anything but tensors whose numbers can be read one by one."""
    for name, value in given.items():
        if not isinstance(value, Tensor):
            raise UserError(f"{name} are a {type(value).__name__}; pass a tensor, such as torch.as_tensor({name})")
        with torch._C.DisableTorchFunctionSubclass():
            require_numbers(name, value)


def require_numbers(name: str, given: Tensor) -> None:
    """Raise UserError for a tensor whose numbers cannot be read one by one."""
    if given.is_nested or given.is_meta or given.layout is not torch.strided or given.is_quantized:
        raise UserError(f"{name} hold no dense numbers ({given.layout}, {given.device}); pass a plain dense tensor")
    if torch._C._functorch.is_functorch_wrapped_tensor(given):
        raise UserError(f"{name} are inside a transform of torch.func (vmap, grad, ...); call certify outside of it")


def _require_float(images_BCHW: Tensor, floats: tuple[torch.dtype, ...]) -> None:
    if images_BCHW.dtype not in floats:
        raise UserError(
            f"images are {images_BCHW.dtype}; pass float32 in [0,1]: images.float(), or images / 255 for bytes"
        )


def _require_integers(labels_B: Tensor) -> None:
    if labels_B.dtype not in INTEGERS:
        raise UserError(f"labels are {labels_B.dtype}; pass integers: labels.long()")


def _require_unit(images_BCHW: Tensor) -> None:
    """Raise UserError for a pixel outside [0,1] or NaN. One wait for the device."""
    if not images_BCHW.numel():
        return
    least, largest = torch.stack(images_BCHW.detach().aminmax()).tolist()
    if not (least >= 0 and largest <= 1):
        raise UserError(f"images must lie in [0,1], but range from {shown(least)} to {shown(largest)}; {UNIT}")
