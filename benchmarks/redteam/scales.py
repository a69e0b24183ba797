"""Weights of other sizes and shapes.

    scales   a layer times S and the next one by 1 / S, S a power of two from 1e-300 to 1e300: the same function. No
             method may claim a smaller loss than the drop found without S. A method without randomness may not claim
             a smaller loss than without S, up to 1e-6
    shapes   a parameter in every shape that torch accepts in its place: another function, which is attacked as it is

Scaled models are float64, because float32 ends at 1e38.
"""

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, product
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.redteam.claims import METHODS, analysis_of, certified_claim, claim_at, drop, ratio
from benchmarks.redteam.finding import Finding
from certify.shared.ball import NORMS
from tests.tools.trials import KINDS, SIZES, Subject

EXPONENTS = tuple(sign * e for e in (10, 40, 130, 330, 560, 996) for sign in (1, -1))  # of two: 2^996 is 7e299
GROWTH = 1e-6  # relative decrease allowed for the claim about the same function, without randomness
Scale = Callable[[float], None]


@dataclass(frozen=True)
class Scaled:
    """One model without S and with it."""

    plain: Any
    scaled: Any
    place: str


def findings(seed: int) -> Iterator[Finding]:
    """Alternate between scales and shapes, over all kinds of models, methods and norms."""
    for number in count(seed):
        kind = KINDS[number % len(KINDS)]
        subject = Subject(kind, list(SIZES)[number // 3 % len(SIZES)], number)
        method, norm = tuple(product(METHODS, NORMS))[number // 2 % 8]
        yield from (of_scales, of_shapes)[number % 2](subject, method, norm)


def of_scales(subject: Subject, method: str, norm: str) -> Iterator[Finding]:
    """Try one place of the model with a few S."""
    generator = torch.Generator().manual_seed(subject.seed)
    plain, x = subject.model().double(), subject.images(1)
    if not (found := places(plain)):
        return
    place = list(found)[int(torch.randint(len(found), (), generator=generator))]
    analysis = analysis_of(plain, x, method, norm)
    if analysis is None or not bool((claim := certified_claim(analysis)).eps_B.gt(0).all()):
        return
    dropped = float(drop(plain, x, analysis.clean.label_B, claim, norm).clamp_min(0).amax())
    for which in torch.randperm(len(EXPONENTS), generator=generator)[:3].tolist():
        scaled = copy.deepcopy(plain)
        places(scaled)[place](2.0 ** EXPONENTS[which])
        other = analysis_of(scaled, x, method, norm)
        loss = math.inf if other is None else float(claim_at(other, claim.eps_B).loss_B.amax())
        by_chance = analysis.failure > 0 or (other is not None and other.failure > 0)
        least = dropped if by_chance else max(dropped, float(claim.loss_B.amax()) / (1 + GROWTH))
        where = {"kind": subject.kind, "seed": subject.seed, "place": place, "exponent": EXPONENTS[which]}
        yield Finding(f"scale: {method} {norm}", least / max(loss, 1e-300), 1, where)


def places(model: nn.Module) -> dict[str, Scale]:
    """Return the places where S and 1 / S cancel.

    They are values and projection, a norm and its reader, convolutions around a ReLU, the last norm and the head.
    """
    found: dict[str, Scale] = {}
    for name, module in model.named_modules():
        if hasattr(module, "qkv") and hasattr(module, "proj"):
            found[f"{name}: values, projection"] = _values(module)
        own: Any = getattr(module, "attn", None)
        attention = getattr(own, "content", own)
        if hasattr(module, "norm1") and hasattr(attention, "qkv") and hasattr(module.norm1, "bias"):
            found[f"{name}: norm1, qkv"] = _pair(module.norm1, attention.qkv)
        if hasattr(module, "norm2") and hasattr(getattr(module, "mlp", None), "fc1") and hasattr(module.norm2, "bias"):
            found[f"{name}: norm2, fc1"] = _pair(module.norm2, module.mlp.fc1)
        if isinstance(getattr(module, "act", None), nn.ReLU) and hasattr(module, "fc1") and hasattr(module, "fc2"):
            found[f"{name}: fc1, fc2"] = _pair(module.fc1, module.fc2)
    last = next((norm for key in ("norm", "fc_norm") if hasattr(norm := getattr(model, key, None), "bias")), None)
    if last is not None and last.bias is not None and isinstance(model.head, nn.Linear):
        found["last norm, head"] = _pair(last, model.head)
    layers = [module for module in model.modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    if any(isinstance(module, nn.ReLU) for module in model.modules()) and hasattr(model, "fcs"):
        found |= {f"layers {i}, {i + 1}": _pair(*layers[i : i + 2]) for i in range(len(layers) - 1)}
    return found


def _pair(first: Any, second: Any) -> Scale:
    """Scale a map with its offset, and the weight of the next."""

    def scale(s: float) -> None:
        for parameter in (first.weight, first.bias):
            if parameter is not None:
                parameter.data.mul_(s)
        second.weight.data.div_(s)

    return scale


def _values(attention: Any) -> Scale:
    def scale(s: float) -> None:
        width = attention.qkv.in_features
        attention.qkv.weight.data[2 * width :].mul_(s)
        if attention.qkv.bias is not None:
            attention.qkv.bias.data[2 * width :].mul_(s)
        attention.proj.weight.data.div_(s)

    return scale


# shapes ---------------------------------------------------------------------------------------------------------------


def of_shapes(subject: Subject, method: str, norm: str) -> Iterator[Finding]:
    """Try one parameter in every shape in which the model still answers."""
    generator = torch.Generator().manual_seed(subject.seed)
    model, x = subject.model(), subject.images(2)
    names = [name for name, _ in model.named_parameters()]
    name = names[int(torch.randint(len(names), (), generator=generator))]
    for shape in shapes(tuple(model.get_parameter(name).shape), tokens_of(model, x)):
        reshaped = with_shape(model, name, shape, generator)
        if not answers(reshaped, x):
            continue
        analysis = analysis_of(reshaped, x, method, norm)
        where = {"kind": subject.kind, "seed": subject.seed, "parameter": name, "shape": list(shape)}
        found = 0.0 if analysis is None else ratio(reshaped, x, analysis, certified_claim(analysis), norm)
        yield Finding(f"shape: {method} {norm}", found, 1, where)


def shapes(shape: tuple[int, ...], tokens: int) -> list[tuple[int, ...]]:
    """Return shapes with axes of length 1, leading axes, trailing axes, and, for vectors, one entry per token."""
    kept = [tuple(length if keep else 1 for length, keep in zip(shape, keeps, strict=True))
            for keeps in product((True, False), repeat=len(shape))]  # fmt: skip
    found = [(), *kept, *((1, *one) for one in kept), *((1, 1, *one) for one in kept), *((*one, 1) for one in kept)]
    if len(shape) == 1:
        found += [(tokens, 1), (tokens, *shape), (*shape, *shape), (tokens,)]
    if len(shape) == 3:  # positions
        found += [(1, shape[1], 2 * shape[2]), (shape[1], shape[1], shape[2]), shape[1:], shape[2:]]
    return [one for one in dict.fromkeys(found) if one != shape]


def tokens_of(model: Any, x: Tensor) -> int:
    """Return the number of tokens, or pixels, after the first layer."""
    patches = getattr(getattr(model, "patch_embed", None), "num_patches", None)
    return x[0, 0].numel() if patches is None else int(patches)


def with_shape(model: Any, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Any:
    """Return a copy with random numbers of this shape, of the size of the original ones."""
    copied = copy.deepcopy(model)
    path, _, last = name.rpartition(".")
    old = model.get_parameter(name)
    values = torch.randn(shape, generator=generator) * old.square().mean().sqrt().clamp_min(0.1)
    setattr(copied.get_submodule(path), last, nn.Parameter(values.to(old), requires_grad=False))
    return copied


def answers(model: Any, x: Tensor) -> bool:
    """Return True if the model still gives each image its logits."""
    try:
        with torch.no_grad():
            logits = model(x)
    except Exception:  # any error of torch, or of a module, about the shape
        return False
    return bool(logits.ndim == 2 and len(logits) == len(x) and logits.isfinite().all())
