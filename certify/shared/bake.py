"""The function that is certified: the model in eval mode, with parametrisations folded, in float64.

Weights are folded in the precision in which they are served and then widened, so that the float64 function has exactly
the served weights (docs/proofs.md#served-weights). The model must compute what its code and its weights say
(zoo/bounds/integrity.py); a copy of it, with the same types and the same weights, is certified.
"""

import copy
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from textwrap import shorten

import torch
from torch import Tensor, fx, nn
from torch.nn.parameter import is_lazy

from certify.shared.certificate import Clean, margins_of
from certify.shared.unchanged import Snapshot
from certizoo import UserError
from zoo.bounds import integrity
from zoo.bounds.rule_table import refuse_altered
from zoo.layers.fold import folded
from zoo.layers.patches import Normalize

LOGIT_TOLERANCE = 1e-3  # float32 margins against float64 ones, each relative to its own 1 + |margin|
COARSE = 0.25  # the same for bfloat16, whose rounding is part of the certificate
SERVED = (torch.float32, torch.float64)
PROBES = 4  # images of each kind at which served and certified logits are compared
STEP = 1e-2  # distance of the probes near an image


@dataclass(frozen=True)
class Model:
    """A model that is certified.

    `served` is a copy of the given model in its own type, `exact` the float64 function. `snapshots` hold the state of
    the given model and of both copies when they were measured.
    """

    served: nn.Module
    exact: nn.Module
    snapshots: tuple[Snapshot, ...]

    def also(self, given: nn.Module) -> "Model":
        """Return this model with `given`, the model that `served` was copied from; it must not change either."""
        return replace(self, snapshots=(*self.snapshots, Snapshot.of(given)))

    def require_unchanged(self, *, digests: bool = False) -> None:
        """Raise UserError if one of the models has changed.

        Without `digests`, only changes that torch records are detected.
        """
        for snapshot in self.snapshots:
            snapshot.require(digests=digests)

    @torch.no_grad()
    def answers(self, images_BCHW: Tensor, labels_B: Tensor) -> Clean:
        """Return the answers of both functions for images; an image is correct if both give its label.

        Raises UserError for images that the model does not accept, for a model that has changed, and if the two are not
        one function at these images or near them.
        """
        refuse_process()
        self.require_unchanged(digests=True)
        with images_taken(tuple(images_BCHW.shape[1:])):
            exact_BJ = self.exact(images_BCHW)
        dtype = next(self.served.parameters()).dtype
        logit_differences(self.served, self.exact, probes(images_BCHW))
        prediction_B = self.served(images_BCHW.to(dtype, copy=True)).argmax(-1)  # it may write to them
        margin_BJ = margins_of(exact_BJ, labels_B)
        correct_B = (margin_BJ.amin(-1) > 0) & (prediction_B == labels_B)
        return Clean(prediction_B, labels_B, margin_BJ, correct_B, self.require_unchanged)


@contextmanager
def images_taken(shape: tuple[int, ...]) -> Iterator[None]:
    """Turn what a model says of images of this shape that it does not take into one line."""
    try:
        yield
    except (torch.OutOfMemoryError, UserError):
        raise
    except (RuntimeError, AssertionError, IndexError, TypeError, ValueError) as error:
        said = said_of(error)
        raise UserError(f"the model does not take images of {shape}: {said}; pass images of its size") from error


def said_of(error: BaseException) -> str:
    """Return the beginning of an error's text, in one line."""
    return shorten(str(error), 160, placeholder=" ...") or type(error).__name__


def model_of(model: nn.Module | Model, types: Collection[torch.dtype] = SERVED) -> Model:
    """Return what is certified of a model with weights of these types. Raises UserError for an invalid model."""
    if isinstance(model, Model):
        return model
    served = _copied(model)
    _refuse_types(served, types)
    served, exact = served.requires_grad_(False), _widened(served)
    return Model(served, exact, tuple(map(Snapshot.of, (model, served, exact))))


def model_from(given: nn.Module, served: nn.Module, exact: nn.Module) -> Model:
    """Return what is certified of a model whose float64 function is `exact`. Raises UserError as `model_of` does."""
    _refuse_types(served, SERVED)
    _refuse_active(served)
    _refuse(exact)  # its numbers are the ones that count: a mask of the served model may hold -inf
    return Model(served, exact, tuple(map(Snapshot.of, (given, served, exact))))


def bake(model: nn.Module) -> nn.Module:
    """Return a float64 copy of `model` in eval mode, without parametrisations and gradients. `model` stays as it is.

    Raises UserError for a model that is not a deterministic function of finite numbers, see `_refuse`; and NoRule if
    anything but the code of its types takes part.
    """
    return _widened(_copied(model))


def refuse_process() -> None:
    """Raise UserError if this process has changed what every module computes."""
    if fault := integrity.fault_of_process():
        raise UserError(fault)


def refuse_impostor(model: nn.Module) -> None:
    """Raise UserError for a model that computes something other than its code and its weights say.

    The model is inspected, and none of its own code is called.
    """
    if not isinstance(model, nn.Module):
        raise UserError(f"the model is a {type(model).__name__}; pass a torch.nn.Module, such as zoo.create_model(...)")
    refuse_process()
    for path, module in integrity.modules_of(model):
        refuse_altered(module, path)
    refuse_sparse(model)


def refuse_sparse(model: nn.Module) -> None:
    """Raise UserError for weights whose numbers cannot be read one by one."""
    for path, tensor in integrity.tensors_of(model):
        if is_lazy(tensor):
            raise UserError(f"{path} has no numbers yet; call the model once, or remove the layer if it is not used")
        if tensor.is_meta or tensor.layout is not torch.strided or tensor.is_quantized:
            raise UserError(f"{path} holds no dense numbers; load or dequantise the weights first")


def _copied(model: nn.Module) -> nn.Module:
    """Return the folded copy of a model that passes `refuse_impostor`."""
    refuse_impostor(model)
    return folded_copy(model)


def folded_copy(model: nn.Module) -> nn.Module:
    """Return a folded copy in eval mode.

    The copy is compared with the model, because a module of unknown type may copy itself as another.
    """
    copied = folded(model)
    given = {path: _kind(module) for path, module in integrity.modules_of(model) if _outlives(path)}
    if {path: _kind(module) for path, module in integrity.modules_of(copied)} != given:
        raise UserError("a copy of the model has different modules from the model; remove its own __deepcopy__")
    weights = dict(integrity.tensors_of(copied))
    for path, tensor in integrity.tensors_of(model):
        if _outlives(path) and not _equal(weights.get(path), tensor):
            raise UserError(f"{path} differs in a copy of the model; remove its own __deepcopy__")
    return copied


def _kind(module: nn.Module) -> type[nn.Module]:
    """Return the type of the module, without what torch derives from it for this object alone."""
    return fx.GraphModule if issubclass(type(module), fx.GraphModule) else integrity.kind_of(module)


def _outlives(path: str) -> bool:
    """Return whether the part at this path remains after folding."""
    return "parametrizations" not in path.split(".")


def _equal(one: Tensor | None, other: Tensor) -> bool:
    if one is None or one.dtype != other.dtype:
        return False
    return torch.equal(one, other) or torch.equal(one.nan_to_num(), other.nan_to_num())


def _refuse_types(served: nn.Module, types: Collection[torch.dtype]) -> None:
    """Raise UserError unless all weights have one of these types.

    In a model of mixed types, sums are computed in one type and stored in another, so that the served function is no
    longer the widened one.
    """
    found = dict[torch.dtype, str]()
    for path, tensor in integrity.tensors_of(served):
        if tensor.is_floating_point() or tensor.is_complex():
            found.setdefault(tensor.dtype, path)
    names = ", ".join(f"{path} {dtype}".replace("torch.", "") for dtype, path in found.items())
    if len(found) > 1:
        raise UserError(f"the weights have several types ({names}); certify model.float()")
    if not any(dtype in types for dtype in found):
        raise UserError(
            f"the weights are {names or 'none'}, and such a model does not answer like its float64 function; "
            "certify model.float() and serve that, or let certify.served_dtype=bfloat16 prove the rounding"
        )


def probes(images_BCHW: Tensor) -> Tensor:
    """Return the first few images, points near them, and points anywhere in the box; the same ones every time."""
    first = images_BCHW[:PROBES]
    noise = torch.rand(first.shape, generator=torch.Generator().manual_seed(0), dtype=first.dtype).to(first.device)
    return torch.cat([first, first + STEP * (2 * noise - 1), noise])


def _widened(served: nn.Module) -> nn.Module:
    baked = copy.deepcopy(served).double().requires_grad_(False)
    _refuse(baked)
    return baked


def _refuse_active(baked: nn.Module) -> None:
    """Raise UserError for dropout that stays active after eval(), or for a bad std."""
    for name, module in integrity.modules_of(baked):
        if module.training:
            raise UserError(
                f"{name or 'the model'} ({type(module).__name__}) stays in training mode after eval(), so that dropout "
                "may be active; a certificate needs eval mode"
            )
        if isinstance(module, Normalize) and not bool((module.std > 0).all()):
            raise UserError(
                f"{name} divides by a std that is not above 0; set mean and std of the data in the model's config"
            )


def _refuse(baked: nn.Module) -> None:
    """Raise UserError for what `_refuse_active` finds, or for numbers that are not finite."""
    _refuse_active(baked)
    for name, tensor in integrity.tensors_of(baked):
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise UserError(f"{name} holds NaN or infinite values; certify an earlier checkpoint or train again")


def logit_differences(model: nn.Module, baked: nn.Module, images_BCHW: Tensor) -> Tensor:
    """Return max |served logits - baked logits| image by image: (B,). Every module of the model keeps its mode.

    Raises UserError if the margins of the predicted class differ for any image or class: huge logits of one do not
    excuse another.
    """
    dtype, modes = next(model.parameters()).dtype, [(module, module.training) for module in model.modules()]
    tolerance = COARSE if dtype is torch.bfloat16 else LOGIT_TOLERANCE
    model.eval()
    try:
        with torch.no_grad():
            served = model(images_BCHW.to(dtype)).double()
            exact = baked(images_BCHW.double())
    finally:
        for module, training in modes:
            module.training = training
    top_B1 = exact.argmax(-1, keepdim=True)
    margin_BJ, served_margin_BJ = (logits.gather(1, top_B1) - logits for logits in (exact, served))
    off_BJ = (served_margin_BJ - margin_BJ).abs()
    if not bool((off_BJ <= tolerance * (1 + margin_BJ)).all()):
        raise UserError(
            f"the baked float64 model does not reproduce the model's margins (off by {float(off_BJ.max()):.3g}); serve "
            "it in float32, look for huge offsets in biases, or for a module that behaves differently in eval mode"
        )
    return (served - exact).abs().amax(-1)
