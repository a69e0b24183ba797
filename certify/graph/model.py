"""A model of any class as one that has rules: captured, rebuilt, and compared with the model.

    model -> float64, eval mode -> graph -> nodes -> `Captured`: a chain of modules with copies of the weights, a head

The certificate is of the captured function. It has the model's logits at the certified images and near them, which is
checked in float64 here and as the model is served by certify/shared/bake.py. Proof: docs/proofs.md#captured.

Letters: B images, J classes.
"""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from certify.graph.export import BATCH, captured_graph
from certify.graph.interpret import Fault, Walk
from certify.graph.tree import TooLarge, Tree, named
from certify.graph.values import Node, Unmapped, materialised
from certify.shared.bake import (
    Model,
    folded_copy,
    images_taken,
    logit_differences,
    model_from,
    probes,
    refuse_process,
    refuse_sparse,
    said_of,
)
from certify.shared.certificate import batch_given
from certizoo import UserError
from zoo.bounds import integrity
from zoo.bounds.rule_table import Links, ModuleRules, NoRule, has_rules, register

ALIKE = 1e-8  # captured against given logits in float64, relative to the two that are compared
ADVICE = "certify.explain(model, images) lists every layer; docs: 'My own model' shows how to add a rule"


class Captured(nn.Module):
    """The steps up to the head, and the head: images (B, C, H, W) of one shape -> logits (B, J)."""

    def __init__(self, parts: nn.Sequential, head: nn.Linear, shape_CHW: tuple[int, ...]) -> None:
        super().__init__()
        self.parts, self.head, self.shape_CHW = parts, head, shape_CHW

    def forward(self, x_BCHW: Tensor) -> Tensor:
        if tuple(x_BCHW.shape[1:]) != self.shape_CHW:
            raise UserError(
                f"the model was captured for images of {self.shape_CHW}, not of {tuple(x_BCHW.shape[1:])}; make a new "
                "certifier for these"
            )
        logits: Tensor = self.head(self.parts(x_BCHW))
        return logits


def captured_trunk(module: Captured) -> tuple[Links, nn.Linear]:
    """Return the steps and the head."""
    return list(module.parts), module.head


register(Captured, ModuleRules(trunk=captured_trunk))


class NotCaptured(NoRule):
    """Some operations of a model have no counterpart; `faults` lists all of them."""

    def __init__(self, model: nn.Module, faults: list[Fault]) -> None:
        self.faults = faults
        more = "" if len(faults) == 1 else f"{len(faults)} operations, "
        listed = "; ".join(dict.fromkeys(str(fault) for fault in faults))
        UserError.__init__(self, f"NoRule({type(model).__name__}): {more}{listed}; {ADVICE}")
        self.module_type = type(model)


@dataclass(frozen=True)
class Capture:
    """A captured model: the rebuilt function, or what is missing for it."""

    exact: Captured | None
    faults: list[Fault]


def with_rules(model: nn.Module, images_BCHW: Tensor, labels_B: Tensor) -> nn.Module | Model:
    """Return the model itself where rules describe it, else what was captured of it.

    Raises UserError for a model that is not a function of images, and for one with operations that have no rule.
    """
    if has_rules(model):
        return model
    images, _ = batch_given(images_BCHW, labels_B)
    served = prepared(model)
    found = capture(served, tuple(images.shape[1:]))
    if found.exact is None:
        raise NotCaptured(model, found.faults)
    _require_alike(served, found.exact, images)
    logit_differences(model, found.exact, probes(images.to(next(model.parameters()).device)))  # it is no copy
    return model_from(model, served, found.exact)


def prepared(model: nn.Module) -> nn.Module:
    """Return a copy in eval mode with folded parametrisations. Raises UserError unless it is a plain module."""
    refuse_process()
    for path, module in integrity.modules_of(model):
        _refuse_uncapturable(path, module)
    refuse_sparse(model)
    if next(model.parameters(), None) is None:
        raise UserError(f"{type(model).__name__} has no parameters to have been trained; certify a classifier")
    return folded_copy(model).requires_grad_(False)


def _refuse_uncapturable(path: str, module: nn.Module) -> None:
    """Raise UserError for a module whose own code cannot be traced, or whose tensors cannot be copied."""
    name, place, state = path or "the model", f"{path}." if path else "", vars(module)
    if "_orig_mod" in state.get("_modules", {}):
        raise UserError(f"{name} is compiled; certify the model inside, {path or 'model'}._orig_mod")
    if isinstance(module, torch.jit.ScriptModule):
        raise UserError(f"{name} is TorchScript, whose operations cannot be traced; certify the model it was made from")
    results = [key for key, value in state.items() if key not in integrity.KEPT and _holds_result(value)]
    if results:
        raise UserError(
            f"{place}{results[0]} keeps the result of a computation, which cannot be copied; for weight_norm or "
            "spectral_norm of torch.nn.utils call remove_weight_norm or remove_spectral_norm, else clear it and call "
            "the model under torch.no_grad()"
        )


def _holds_result(value: object) -> bool:
    """Return whether a value is a tensor with a gradient's history, or a collection that holds one."""
    if isinstance(value, Tensor):
        return not value.is_leaf
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return any(map(_holds_result, items))


def capture(served: nn.Module, shape: tuple[int, ...]) -> Capture:
    """Capture a prepared model for images of one shape."""
    device = next(served.parameters()).device
    wide = copy.deepcopy(served).double().cpu()
    _require_accepted(served, wide, shape)
    walk = Walk(captured_graph(wide, shape), wide)
    value = walk.result()
    if value is None:
        return Capture(None, walk.faults)
    try:
        end = materialised(value)
        parts = Tree(end).parts(_image(end), end)
    except Unmapped as lacking:
        return Capture(None, [Fault("output", str(lacking), "the result")])
    except TooLarge:
        return Capture(None, [Fault("sum", "branches that share too much", "the whole graph")])
    if len(end.shape) != 1:
        return Capture(None, [Fault("output", f"logits of the shape {end.shape}; return (B, classes)", "the result")])
    head = parts.pop()[1] if parts and type(parts[-1][1]) is nn.Linear else identity_head(end.shape[0])
    assert isinstance(head, nn.Linear)
    return Capture(Captured(named(parts), head, shape).double().eval().requires_grad_(False).to(device), [])


@torch.no_grad()
def _require_accepted(served: nn.Module, wide: nn.Module, shape: tuple[int, ...]) -> None:
    """Raise UserError if the float64 model does not run on images of this shape; it says if the served one does."""
    try:
        with images_taken(shape):
            wide(gray(wide, shape))
    except UserError as refused:
        with images_taken(shape):
            served(gray(served, shape))
        raise UserError(
            f"the model does not run in float64: {said_of(refused.__cause__ or refused)}; register every weight and "
            "constant as a parameter, buffer or module (nn.ModuleList for lists), so that model.double() reaches it"
        ) from None


def gray(model: nn.Module, shape: tuple[int, ...]) -> Tensor:
    """Return gray images of the type and on the device of the model's weights: (BATCH, *shape)."""
    like = next(model.parameters())
    return torch.full((BATCH, *shape), 0.5, dtype=like.dtype, device=like.device)


def _image(end: Node) -> Node:
    while end.inputs:
        end = end.inputs[0]
    return end


def identity_head(classes: int) -> nn.Linear:
    """Return the identity, for a model that does not end in a linear layer: its logits are its features."""
    head = nn.Linear(classes, classes, bias=False)
    with torch.no_grad():
        head.weight.copy_(torch.eye(classes))
    return head


def _require_alike(served: nn.Module, exact: Captured, images_BCHW: Tensor) -> None:
    """Raise UserError unless the captured function has the model's margins, in float64, at every call.

    It is asked at images and near them, anywhere in the box, at its darkest and brightest image, in batches of another
    size, and one by one.
    """
    wide = copy.deepcopy(served).double()
    x = probes(images_BCHW.double().to(next(wide.parameters()).device))
    x = torch.cat([x, torch.zeros_like(x[:1]), torch.ones_like(x[:1])])
    with torch.no_grad():
        with images_taken(tuple(images_BCHW.shape[1:])):
            given, again = wide(x), wide(x)
            parts = [wide(part) for part in (x[:-3], *x[-3:].split(1))]
        found = exact(x)
    same = given.shape == found.shape and all(part.shape[1:] == found.shape[1:] for part in parts)
    if not (same and all(_alike(one, found) for one in (given, again, torch.cat(parts)))):
        raise UserError(
            f"{type(served).__name__} computes other logits than its captured graph; look for state that changes "
            "from call to call, or for a size that depends on the batch"
        )


def _alike(given_BJ: Tensor, found_BJ: Tensor) -> bool:
    """Return whether two functions have the same margins: a number that is added to all logits changes none."""
    off_BJ, size_BJ = given_BJ - found_BJ, given_BJ.abs()
    return bool(((off_BJ - off_BJ[:, :1]).abs() <= ALIKE * (1 + size_BJ + size_BJ[:, :1])).all())
