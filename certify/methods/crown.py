"""CROWN (Zhang et al. 2018; Xu et al. 2020) by auto_LiRPA, if it is installed; the only module that imports it.

    m_j(x') >= min over ||x' - x||_p <= eps of  <a_j, x'> + b_j  =  <a_j, x> + b_j - eps ||a_j||_q,    1/p + 1/q = 1

with the linear lower bounds (a_j, b_j) of m_j = <e_y - e_j, logits> that auto_LiRPA propagates backwards through the
traced model. As everywhere here, the whole ball is covered, without the [0,1] box; bounds are computed in float64. The
answer is `unknown` if the model cannot be traced, a bound fails or overflows, or auto_LiRPA is missing.

The proof relies on auto_LiRPA's code, whose relaxations of exp and softmax are accurate to about 1e-10 only (constants
of 1e-12 in denominators, tangents for chords of intervals below 1e-5): hence TOLERANCE. Run with auto_LiRPA 0.7.1.

Letters: B images, J classes, y the label.
"""

import copy
import importlib.util
import logging
import math
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import DropPath
from torch import Tensor, nn

from certify.methods.lofast import LoFAST
from certify.shared.bake import Model
from certify.shared.ball import L2, LINF, known
from certify.shared.batching import CorrectImages
from certify.shared.certificate import Certificate, checked, decide, margin_rows, of_images, per_image
from zoo.layers.mlp import SLL
from zoo.layers.norms import LayerProject, SmoothProject

ORDER = {L2: 2.0, LINF: math.inf}
TOLERANCE = 1e-6  # relative to 1 + |m_j|; far above what auto_LiRPA neglects, and added to every loss
INSTALL = (
    "pip install 'certizoo[crown]' && pip install --no-deps git+https://github.com/Verified-Intelligence/auto_LiRPA"
)
WRONG_POWERS = "auto_LiRPA's bounds of even powers are wrong; only squares by ** or pow are rewritten"
Bounds = Callable[[Tensor, Tensor, float], Tensor]  # x (1, C, H, W), rows (J - 1, J), eps -> lower bounds (J - 1,)
_DEFAULT_DTYPE = threading.Lock()
_log = logging.getLogger(__name__)


class CrownAnalysis:
    """Bounds computed for every eps anew, image by image, and remembered.

    Nothing is computed for an image where a larger ball was certified or a smaller one was unknown. At eps = 0 only
    rounding is left, which LoFAST bounds layer by layer. Proof: docs/proofs.md#crown.
    """

    failure = 0.0

    def __init__(self, at_image: CorrectImages, images_BCHW: Tensor, bounds: Bounds | None) -> None:
        self.clean, self.ball, self._at_image = at_image.clean, at_image.ball, at_image
        self._images, self._bounds = images_BCHW, bounds
        self._known: list[dict[float, Tensor]] = [{} for _ in images_BCHW]  # eps -> loss (J,)

    def at(self, eps: float | Tensor) -> Certificate:
        eps_B = per_image(eps, self.clean)
        loss_BJ = torch.stack([self._loss(i, e) for i, e in enumerate(eps_B.tolist())])
        return of_images(eps_B == 0, self._at_image.at(0.0), decide(self.clean, loss_BJ, eps_B))

    def _loss(self, i: int, eps: float) -> Tensor:
        margin_J, known = self.clean.margin_BJ[i], self._known[i]
        if eps == 0:
            return torch.zeros_like(margin_J)
        if not bool(self.clean.correct_B[i]):
            return torch.full_like(margin_J, torch.inf)
        for e, loss_J in known.items():
            if e >= eps and bool((margin_J > loss_J).all()):  # the larger ball contains the smaller one
                return loss_J
            if e <= eps and not bool(torch.isfinite(loss_J).all()):
                return loss_J
        known[eps] = self._new_loss(i, eps)
        return known[eps]

    def _new_loss(self, i: int, eps: float) -> Tensor:
        margin_J = self.clean.margin_BJ[i]
        loss_J, rival_J = torch.full_like(margin_J, torch.inf), torch.isfinite(margin_J)
        loss_J[self.clean.label_B[i]] = 0
        if self._bounds is None:
            return loss_J
        rows_RJ = margin_rows(self.clean.label_B[i : i + 1], margin_J)[0, rival_J]
        try:
            lower_R = self._bounds(self._images[i : i + 1], rows_RJ, eps).to(margin_J)
        except Exception as error:  # any error of the foreign library means unknown
            _log.warning("crown: auto_LiRPA failed at eps %g: %s", eps, _one_line(error))
            return loss_J
        loss_R = margin_J[rival_J] - lower_R + TOLERANCE * (1 + margin_J[rival_J].abs())
        loss_J[rival_J] = torch.where(torch.isfinite(loss_R), loss_R, torch.inf)
        return loss_J


class Crown:
    """The certifier of one model. Raises NoRule for a model that the other methods refuse as well."""

    def __init__(self, model: nn.Module | Model, norm: str = L2) -> None:
        self.norm = known(norm)
        self.lofast = LoFAST(model, norm)
        self.model, self.baked = self.lofast.model, self.lofast.baked
        self._bounds: Bounds | None = None
        self._tried = False

    @torch.no_grad()
    def analyse(self, images_BCHW: Tensor, labels_B: Tensor) -> CrownAnalysis:
        """Analyse images (B, C, H, W) in [0,1] with labels (B,) of the model's classes."""
        images, _ = checked(images_BCHW, labels_B, self.lofast.head)
        if not self._tried:
            self._bounds, self._tried = _bounds_or_none(self.baked, images[:1], self.norm), True
        return CrownAnalysis(self.lofast.analyse(images_BCHW, labels_B), images, self._bounds)


def installed() -> bool:
    """Return whether auto_LiRPA is installed."""
    return importlib.util.find_spec("auto_LiRPA") is not None


def _bounds_or_none(baked: nn.Module, x_1CHW: Tensor, norm: str) -> Bounds | None:
    if not installed():
        _log.warning("crown answers unknown: auto_LiRPA is not installed; %s", INSTALL)
        return None
    try:
        return traced(baked, x_1CHW, norm)
    except Exception as error:  # usually an operation that auto_LiRPA does not support
        _log.warning("crown answers unknown: auto_LiRPA cannot take this model: %s", _one_line(error))
        return None


def traced(baked: nn.Module, x_1CHW: Tensor, norm: str) -> Bounds:
    """Return the bounds of a model traced for one image.

    Raises AssertionError where the trace computes another function than the model, and NotImplementedError for a power
    that `Plain` does not see, such as one computed in place.
    """
    import auto_LiRPA

    with _float64(), Plain():
        bounded = auto_LiRPA.BoundedModule(
            plain(baked), x_1CHW, bound_opts={"conv_mode": "matrix"}, device=str(x_1CHW.device)
        )
    if any(type(node).__name__ == "BoundPow" for node in bounded.nodes()):
        raise NotImplementedError(WRONG_POWERS)
    torch.testing.assert_close(bounded(x_1CHW), baked(x_1CHW), rtol=1e-9, atol=1e-9)

    def lower(x: Tensor, rows_RJ: Tensor, eps: float) -> Tensor:
        ball = auto_LiRPA.PerturbationLpNorm(norm=ORDER[norm], eps=eps)  # no x_L, x_U: the ball alone
        with _float64():
            found, _ = bounded.compute_bounds(
                x=(auto_LiRPA.BoundedTensor(x, ball),), C=rows_RJ[None], method="CROWN", bound_upper=False
            )
        return found[0].detach()

    return lower


@contextmanager
def _float64() -> Iterator[None]:
    """Run auto_LiRPA without warnings and with float64 as the default type, which its identity matrices take.

    The default type belongs to the whole process, hence the lock.
    """
    with _DEFAULT_DTYPE:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            with warnings.catch_warnings(), torch.no_grad():
                warnings.simplefilter("ignore")
                yield
        finally:
            torch.set_default_dtype(before)


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split()[:25])}"


# the same function in operations that auto_LiRPA knows ----------------------------------------------------------------


def plain(baked: nn.Module) -> nn.Module:
    """Return an equal model of operations that auto_LiRPA bounds well.

    Dropout is removed, the constants of SLL layers are precomputed, and norms are written so that bounds of their
    squares cannot fall below zero.
    """
    model = copy.deepcopy(baked)
    for name, module in list(model.named_modules()):
        if type(module) in (nn.Dropout, DropPath):
            model.set_submodule(name, nn.Identity())
        if type(module) is SLL:
            module.register_buffer("up_HD", 2 * (module.weight / module.diagonal_H()).mT)
        if type(module) in _FORWARDS:
            module.forward = _FORWARDS[type(module)].__get__(module)
    return model


def _square_norm(x: Tensor) -> Tensor:
    """Return |x|^2 per token; the ReLU changes nothing but the bounds."""
    return F.relu((x * x).sum(-1, keepdim=True))


def _layer_norm(self: nn.LayerNorm, x: Tensor) -> Tensor:
    u = x - x.mean(-1, keepdim=True)
    y = u / (_square_norm(u) / x.shape[-1] + self.eps).sqrt()
    y = y if self.weight is None else y * self.weight
    return y if self.bias is None else y + self.bias


def _layer_project(self: LayerProject, x: Tensor) -> Tensor:
    square = self.radius**2
    return x * (self.radius / (F.relu(_square_norm(x) - square) + square).sqrt())


def _smooth_project(self: SmoothProject, x: Tensor) -> Tensor:
    return x / (1 + _square_norm(x) / self.radius**2).sqrt()


def _sll(self: SLL, x: Tensor) -> Tensor:
    return x - self.act(x @ self.weight + self.bias) @ self.get_buffer("up_HD")


_FORWARDS: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.LayerNorm: _layer_norm,
    LayerProject: _layer_project,
    SmoothProject: _smooth_project,
    SLL: _sll,
}


def _attention(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, *, scale: float) -> Tensor:
    scores = scale * (q @ k.transpose(-2, -1))
    return torch.softmax(scores if attn_mask is None else scores + attn_mask, -1) @ v


class _Gelu(torch.autograd.Function):
    """GELU traced as one operation, for which auto_LiRPA has a relaxation."""

    @staticmethod
    def symbolic(g: Any, x: Any) -> Any:
        return g.op("custom::Gelu", x)

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def _gelu(x: Tensor, approximate: str = "none") -> Tensor:
    if approximate != "none":
        raise NotImplementedError(f"auto_LiRPA has no relaxation of GELU with approximate={approximate!r}")
    return _Gelu.apply(x)


def _power(x: Tensor, exponent: Any) -> Tensor:
    """Return a square as a product: auto_LiRPA 0.7.1 bounds z**2 on [1, 2] by 3.75 from above."""
    if exponent != 2:
        raise NotImplementedError(WRONG_POWERS)
    return x * x


class Plain(torch.overrides.TorchFunctionMode):
    """A mode that replaces fused and recent operations by the elementary ones they stand for."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _OPERATIONS.get(func, func)(*args, **(kwargs or {}))


_OPERATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    F.scaled_dot_product_attention: _attention,
    F.gelu: _gelu,
    **dict.fromkeys((torch.pow, torch.Tensor.pow, torch.Tensor.__pow__), _power),
    **dict.fromkeys((torch.square, torch.Tensor.square), lambda x: x * x),
    torch.Tensor.mT.__get__: lambda x: x.transpose(-2, -1),  # type: ignore[attr-defined]
}
