"""A certificate holds for code and weights: an object that does something else is refused in one line.

Most attacks here are two-faced: they answer honestly at the clean images, and flip the label beside them.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.nn.utils import parametrize

import zoo
from certify import certified_radius, certify
from certify.methods import METHODS
from certizoo import UserError
from tests.tools.small_models import AVG, SMALL, labelled, small_model
from zoo.attention.dot_product import DotProductAttention
from zoo.attention.scsa import ScaledCosineAttention
from zoo.bounds import first_order, float_error, integrity, rule_table
from zoo.layers.constrained import AOL
from zoo.layers.norms import LayerProject
from zoo.layers.residual import WeightedResidual
from zoo.models.convnet import ConvNet
from zoo.models.vit import ViT

Patch = pytest.MonkeyPatch
Attack = Callable[
    [Any, Patch], Any
]  # An attack changes the model or the process, and may return another object to certify.
CLOSE = 1e-5  # far above the rounding of float32, far below what a certified change does


class TwoFaced:
    """The function f at the inputs it saw first, and nonsense anywhere else."""

    def __init__(self, f: Callable[..., Tensor] | None = None) -> None:
        self.f, self.known = f, list[Tensor]()
        self.shown = False

    def __call__(self, *args: Any, **options: Any) -> Tensor:
        assert self.f is not None
        return self.seen(self.f(*args, **options))

    def seen(self, y: Any) -> Any:
        if isinstance(y, tuple):
            return tuple(self.seen(part) for part in y)
        if not isinstance(y, Tensor) or y.ndim < 2:
            return y
        if not self.shown:
            self.known.append(y.detach().double().flatten(1))
            return y
        flat, same = y.detach().double().flatten(1), torch.zeros(len(y), dtype=torch.bool)
        for known in self.known:
            if known.shape[1:] == flat.shape[1:]:
                same |= (flat[:, None] - known).abs().amax(-1).amin(-1) < CLOSE
        return torch.where(same.view(-1, *[1] * (y.ndim - 1)), y, -50 * y)


def victim() -> tuple[Any, Tensor, Tensor]:
    model = small_model("standard", 0)
    x, y = labelled(model, 4, 0)
    return model, x, y


FACES: list[TwoFaced] = []


def two_faced(f: Callable[..., Tensor] | None = None) -> TwoFaced:
    FACES.append(TwoFaced(f))
    return FACES[-1]


def on_instance(path: str, name: str) -> Attack:
    def attack(model: Any, patch: Patch) -> None:
        part = model.get_submodule(path)
        part.__dict__[name] = two_faced(getattr(part, name))

    return attack


def hooked(path: str, kind: str, **options: bool) -> Attack:
    def attack(model: Any, patch: Patch) -> None:
        face = two_faced()
        hook = {
            "forward": lambda module, args, output: face.seen(output),
            "forward_pre": lambda module, args: (face.seen(args[0]),),
        }[kind]
        if options:
            hook = lambda module, args, kwargs, output: face.seen(output)  # noqa: E731
        getattr(model.get_submodule(path), f"register_{kind}_hook")(hook, **options)

    return attack


def globally(kind: str) -> Attack:
    def attack(model: Any, patch: Patch) -> None:
        face, head = two_faced(), model.head
        hook = {
            "forward": lambda module, args, output: face.seen(output) if isinstance(module, nn.Linear) else None,
            "forward_pre": lambda module, args: (face.seen(args[0]),) if isinstance(module, nn.GELU) else None,
        }[kind]
        assert head is not None
        found = getattr(torch_module, f"_global_{kind}_hooks")
        patch.setitem(found, 10**6, hook)

    return attack


# an attacker's classes and weights -----------------------------------------------------------------------------------


class Pooling(ViT):
    """A registered model with one overridden method."""

    def pool(self, x_BND: Tensor) -> Tensor:
        face: TwoFaced = self.__dict__["face"]
        return face.seen(super().pool(x_BND))


class CopiesAsAnother(ViT):
    """An object whose copies are honest."""

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        honest = copy.copy(self)
        honest.__class__ = ViT  # type: ignore[assignment]
        honest.__dict__.pop("face")
        return copy.deepcopy(honest, memo)

    def pool(self, x_BND: Tensor) -> Tensor:
        face: TwoFaced = self.__dict__["face"]
        return face.seen(super().pool(x_BND))


class Counter(nn.Module):
    """A module that computes another function at every call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.get_buffer("calls").add_(1)
        return x * (1 if self.get_buffer("calls") < 10 else -1)


class Weight(Tensor):
    """A weight that overrides torch functions."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Number(float):
    """A number with another value at every use."""

    def __rmul__(self, other: Any) -> Any:
        return other * 100.0

    __mul__ = __rmul__

    def __deepcopy__(self, memo: Any) -> float:
        return 1.0


class Parts(dict[str, Any]):
    """A dictionary that returns other values than it stores."""


class Doubled(nn.Module):
    """An unknown parametrisation."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight * (1 + torch.rand(()))


class Mode(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def becomes(kind: type[nn.Module]) -> Attack:
    def attack(model: Any, patch: Patch) -> None:
        model.__dict__["face"] = two_faced()
        model.__class__ = kind

    return attack


def namesake(model: Any, patch: Patch) -> None:
    face = two_faced()

    def forward(self: Any, x: Tensor) -> Tensor:
        return face.seen(DotProductAttention.forward(self, x))

    own = {"forward": forward, "__module__": DotProductAttention.__module__}
    model.blocks[0].attn.__class__ = type("DotProductAttention", (DotProductAttention,), own)


def weight_of_a_subclass(model: Any, patch: Patch) -> None:
    linear = model.blocks[0].mlp.fc1
    linear._parameters["weight"] = linear.weight.detach().as_subclass(Weight)


def buffer_of_a_subclass(model: Any, patch: Patch) -> None:
    model.normalize._buffers["mean"] = model.normalize.mean.as_subclass(Weight)


def weight_with_a_method(model: Any, patch: Patch) -> None:
    weight = model.patch_embed.proj.weight
    weight.flatten = lambda *dims: -Tensor.flatten(weight, *dims)


def weight_that_copies_as_another(model: Any, patch: Patch) -> None:
    weight = model.head.weight
    weight.__deepcopy__ = lambda memo: nn.Parameter(-weight.detach())


def copies_as_another(model: Any, patch: Patch) -> None:
    model.__dict__["__deepcopy__"] = lambda memo: small_model("standard", 1)


def hidden_head(model: Any, patch: Patch) -> None:
    model.__dict__["head"] = nn.Linear(16, 4)


def own_parts(kept: str) -> Attack:
    def attack(model: Any, patch: Patch) -> None:
        part = model.blocks[1]
        part.__dict__[kept] = Parts(part.__dict__[kept])

    return attack


def parametrized(path: str, kind: Callable[[], nn.Module]) -> Attack:
    def attack(model: Any, patch: Patch) -> None:
        parametrize.register_parametrization(model.get_submodule(path), "weight", kind())

    return attack


def parametrisation_with_a_method(model: Any, patch: Patch) -> nn.Module:
    capped: nn.Module = zoo.create_model("spec_vit_digits", **(SMALL | AVG))
    linear = capped.get_submodule("blocks.0.attn.qkv")
    patch.setattr(type(linear), "forward", lambda self, x: -F.linear(x, self.weight, self.bias))
    return capped.eval()


def attribute(path: str, name: str, value: Any) -> Attack:
    def attack(model: Any, patch: Patch) -> None:
        setattr(model.get_submodule(path), name, value)

    return attack


def put(path: str, make: Callable[[], nn.Module]) -> Attack:
    return lambda model, patch: model.set_submodule(path, make())


def entered(context: Callable[[], Any]) -> Attack:
    def attack(model: Any, patch: Patch) -> None:
        entry = context()
        entry.__enter__()
        OPEN.append(entry)

    return attack


OPEN: list[Any] = []


def default_type(model: Any, patch: Patch) -> None:
    torch.set_default_dtype(torch.bfloat16)


def compiled(model: Any, patch: Patch) -> nn.Module:
    return torch.compile(model)  # type: ignore[return-value]


def compiled_in_place(model: Any, patch: Patch) -> None:
    model.compile()


def answered_by_another(model: Any, patch: Patch) -> None:
    model._compiled_call_impl = two_faced(model._call_impl)


def broadcast_bias(model: Any, patch: Patch) -> None:
    model.blocks[0].mlp.fc1.bias = nn.Parameter(torch.zeros(4, 32))


def broadcast_branch(model: Any, patch: Patch) -> None:
    model.blocks[0].mlp = nn.Sequential(nn.Linear(16, 1))


def broadcast_weights(model: Any, patch: Patch) -> None:
    model.blocks[0].mlp = nn.Sequential(nn.Linear(16, 1), WeightedResidual(16, init=1.0))


# name -> (attack, words of the refusal)
BREAKING: dict[str, tuple[Attack, str]] = {
    "model.embed": (on_instance("", "embed"), "ViT.*embed is patched"),
    "model.pool": (on_instance("", "pool"), "pool is patched"),
    "model.trunk": (on_instance("", "trunk"), "trunk is patched"),
    "model.forward_head": (on_instance("", "forward_head"), "forward_head is patched"),
    "attention.merge": (on_instance("blocks.0.attn", "merge"), r"blocks\.0\.attn: .*merge is patched"),
    "attention.forward": (on_instance("blocks.1.attn", "forward"), r"blocks\.1\.attn: .*forward is patched"),
    "mlp.forward": (on_instance("blocks.0.mlp", "forward"), r"blocks\.0\.mlp: .*forward is patched"),
    "activation.forward": (on_instance("blocks.0.mlp.act", "forward"), r"mlp\.act: .*forward is patched"),
    "block._call_impl": (on_instance("blocks.0", "_call_impl"), "_call_impl is patched"),
    "model._compiled_call_impl": (answered_by_another, "_compiled_call_impl"),
    "forward hook": (hooked("blocks.0.attn", "forward"), r"blocks\.0\.attn: .*a hook \(_forward_hooks\)"),
    "forward hook with options": (hooked("head", "forward", with_kwargs=True, always_call=True), "head: .*a hook"),
    "forward pre-hook": (hooked("blocks.1.mlp", "forward_pre"), r"blocks\.1\.mlp: .*_forward_pre_hooks"),
    "global forward hook": (globally("forward"), "_global_forward_hooks"),
    "global forward pre-hook": (globally("forward_pre"), "_global_forward_pre_hooks"),
    "subclass": (becomes(Pooling), "Pooling.*no rule"),
    "subclass that copies as another": (becomes(CopiesAsAnother), "__deepcopy__"),
    "class of the same name": (namesake, r"blocks\.0\.attn: .*DotProductAttention.*no rule"),
}
REFUSED: dict[str, tuple[Attack, str]] = BREAKING | {
    "attention.heads": (on_instance("blocks.0.attn", "heads"), "heads is patched"),
    "attention.scores": (on_instance("blocks.0.attn", "scores"), "scores is patched"),
    "model.eval": (on_instance("", "eval"), "eval is patched"),
    "model.named_modules": (on_instance("", "named_modules"), "named_modules is patched"),
    "model.state_dict": (on_instance("", "state_dict"), "state_dict is patched"),
    "model.__deepcopy__": (copies_as_another, "__deepcopy__ is patched"),
    "model.head behind another": (hidden_head, "head hides a part"),
    "backward hook": (
        lambda model, patch: model.head.register_full_backward_hook(lambda module, g_x, g_y: (2 * g_x[0],)),
        "_backward_hooks",
    ),
    "function mode": (entered(Mode), "Mode is active"),
    "autocast": (entered(lambda: torch.autocast("cpu", torch.bfloat16)), "autocast is active"),
    "cached parametrisations": (entered(parametrize.cached), "cached"),
    "products of fewer bits": (
        lambda model, patch: torch.set_float32_matmul_precision("medium"),
        "set_float32_matmul_precision",
    ),
    "default dtype": (default_type, "default dtype is torch.bfloat16"),
    "weight of a subclass": (weight_of_a_subclass, r"mlp\.fc1: .*weight is a Weight"),
    "buffer of a subclass": (buffer_of_a_subclass, "normalize: .*mean is a Weight"),
    "weight with a method": (weight_with_a_method, r"patch_embed\.proj: .*weight has its flatten patched"),
    "weight that copies as another": (weight_that_copies_as_another, "head: .*weight has its __deepcopy__ patched"),
    "own _modules": (own_parts("_modules"), r"blocks\.1: .*_modules is not a plain dictionary"),
    "own _parameters": (own_parts("_parameters"), "_parameters is not a plain dictionary"),
    "number in disguise": (attribute("blocks.0.attn", "scale", Number(0.3)), "scale is a Number"),
    "eps in disguise": (attribute("blocks.0.norm1", "eps", Number(1.0)), "eps is a Number"),
    "unknown parametrisation": (parametrized("blocks.0.mlp.fc1", Doubled), r"mlp\.fc1: .*Doubled of its weight"),
    "parametrisation with a method": (parametrisation_with_a_method, r"qkv: .*forward is not what torch's"),
    "counter": (put("fc_norm", Counter), "fc_norm: .*Counter"),
    "lazy module": (put("blocks.0.mlp.fc1", lambda: nn.LazyLinear(32)), "LazyLinear|Uninitialized"),
    "compiled": (compiled, "model._orig_mod"),
    "compiled in place": (compiled_in_place, "_compiled_call_impl"),
    "LayerNorm without eps": (attribute("norm", "eps", 0.0), "eps above 0"),
    "LayerNorm with a negative eps": (attribute("norm", "eps", -1e-3), "eps above 0"),
    "negative radius": (put("norm", lambda: LayerProject(16, -1.0)), "radius is -1"),
    "bias that is broadcast": (broadcast_bias, "its bias has the shape"),
    "branch that is broadcast": (broadcast_branch, "give input and output the same shape"),
    "weights that are broadcast": (broadcast_weights, "broadcast"),
    "bfloat16": (lambda model, patch: model.bfloat16(), r"bfloat16.*model\.float\(\)"),
    "float16": (lambda model, patch: model.half(), r"float16.*model\.float\(\)"),
    "mixed types": (lambda model, patch: model.head.double() and None, "several types"),
    "complex buffer": (lambda model, patch: model.register_buffer("z", torch.zeros(2) * 1j), "complex64"),
    "no values": (lambda model, patch: model.to("meta"), "no dense numbers"),
    "a function": (lambda model, patch: lambda x: model(x), "is a function"),
}  # fmt: skip


@pytest.fixture
def attacked(request: pytest.FixtureRequest, monkeypatch: Patch) -> Any:
    """Return the certified object, images and labels under the parameter's attack; undo the attack afterwards."""
    model, x, y = victim()
    FACES.clear()
    try:
        given = REFUSED[request.param][0](model, monkeypatch)
        given = given if callable(given) else model
        with torch.no_grad():
            if FACES:
                model(x)  # the images that they treat as clean
        for face in FACES:
            face.shown = True
        yield given, x, y
    finally:
        for entry in reversed(OPEN):
            entry.__exit__(None, None, None)
        OPEN.clear()
        torch.set_default_dtype(torch.float32)
        torch.set_float32_matmul_precision("highest")


@pytest.mark.hostile
@pytest.mark.parametrize("attacked", REFUSED, indirect=True)
def test_anything_beyond_code_and_weights_is_refused(attacked: Any, request: pytest.FixtureRequest) -> None:
    given, x, y = attacked
    words = REFUSED[request.node.callspec.params["attacked"]][1]
    with pytest.raises(UserError, match=words) as refused:
        certified_radius(given, x, y, "lofast")
    assert "\n" not in str(refused.value)


@pytest.mark.hostile
@pytest.mark.parametrize("attacked", BREAKING, indirect=True)
def test_refused_models_would_break_the_certificate(attacked: Any, monkeypatch: Patch) -> None:
    """Without the check the prover certifies a radius inside which the model that runs changes its label."""
    given, x, y = attacked
    monkeypatch.setattr(integrity, "fault_of", lambda module: None)
    monkeypatch.setattr(integrity, "fault_of_process", lambda: None)
    monkeypatch.setattr(first_order, "refuse_unknown", lambda module, path: None)
    monkeypatch.setattr(
        float_error, "defect", lambda f, x, y: torch.zeros_like(y)
    )  # the attack follows the function that really runs
    monkeypatch.setitem(rule_table._TABLE, type(given), rule_table._TABLE[ViT])
    attention = type(given.blocks[0].attn)
    monkeypatch.setitem(rule_table._TABLE, attention, rule_table._TABLE[DotProductAttention])
    if type(given) is CopiesAsAnother:
        monkeypatch.setattr(
            "certify.shared.bake.integrity.kind_of", lambda module: ViT if module is given else type(module)
        )
    radius_B = certified_radius(given, x, y, "lofast")
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    step = noise / noise.flatten(1).norm(dim=1).view(-1, 1, 1, 1) * (0.9 * radius_B).view(-1, 1, 1, 1).float()
    with torch.no_grad():
        assert (radius_B > 0).all()
        assert (given(x).argmax(-1) == y).all()
        assert (given(x + step).argmax(-1) != y).any()


@pytest.mark.hostile
@pytest.mark.parametrize("method", [name for name in METHODS if name != "crown"])
def test_every_method_checks(method: str) -> None:
    model, x, y = victim()
    model.pool = two_faced(model.pool)
    with pytest.raises(UserError, match="pool is patched"):
        certify(model, x, y, eps=1e-3, method=method)


@pytest.mark.hostile
@pytest.mark.parametrize("bound", [-50.0, 50.0])
def test_a_weighted_residual_moves_no_further_than_its_rule_says(bound: float) -> None:
    """A bound below 0 sets every weight to that bound, and the rule holds for it too."""
    module = WeightedResidual(16, init=0.5)
    module.bound = bound
    x, r = torch.zeros(1, 4, 16), torch.ones(1)
    y, moves = first_order.layer_of(module)(x)
    with torch.no_grad():
        moved = float((module(x + 0.125) - y).norm())
    assert moved <= float(moves(r)) * (1 + 1e-6)  # its own sum rounds in float32


@pytest.mark.hostile
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_a_published_constant_is_not_rounded_down(dtype: torch.dtype) -> None:
    """The constant holds for any default dtype."""
    torch.manual_seed(0)
    module = ScaledCosineAttention(16, 2).double()
    x, r = torch.rand(1, 4, 16).double(), torch.ones(1).double()
    exact = first_order.layer_of(module)(x)[1](r)
    torch.set_default_dtype(dtype)
    try:
        assert torch.equal(first_order.layer_of(module)(x)[1](r), exact)
    finally:
        torch.set_default_dtype(torch.float32)


NARROW: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "one channel for three": (lambda: zoo.create_model("dp_vit_ti", **(SMALL | AVG | {"in_chans": 3})), (1, 8, 8)),
    "one patch for four": (lambda: _any_size(zoo.create_model("dp_vit_ti", **(SMALL | AVG))), (1, 4, 4)),
    "one pixel for many": (lambda: ConvNet(layers=[(4, 3, 3, 0)], hidden=[], theta=1.0, **CONV), (1, 3, 3)),
}
CONV: dict[str, Any] = {"img_size": 6, "in_chans": 1, "num_classes": 4, "mean": (0.5,), "std": (0.5,)}


def _any_size(model: Any) -> Any:
    model.patch_embed.strict_img_size = False
    return model


@pytest.mark.hostile
@pytest.mark.parametrize("method", ["lofast", "adjoint"])
@pytest.mark.parametrize("name", NARROW)
def test_images_that_are_broadcast_are_refused(name: str, method: str) -> None:
    """A change of a shared value would count many times, but the rules count it once."""
    torch.manual_seed(0)
    make, shape = NARROW[name]
    model, x = make().eval(), torch.rand(2, *shape)
    with pytest.raises(UserError, match=r"channels|patches|thresholds"):
        certified_radius(model, x, model(x).argmax(-1), method=method)


# honest models are unaffected -------------------------------------------------------------------------------------


def tied(model: Any) -> None:
    model.blocks[1].mlp = model.blocks[0].mlp


def noted(model: Any) -> None:
    model.note = {"author": ["me", 1.5]}
    model.blocks[0].criterion = F.cross_entropy
    for parameter in model.parameters():
        parameter.ds_id = 3


def renamed(model: Any) -> None:
    model.register_state_dict_post_hook(lambda module, state, prefix, meta: state.pop("head.bias", None))


HONEST: dict[str, Callable[[Any], Any]] = {
    "in training mode": lambda model: model.train(),
    "with gradients": lambda model: model.requires_grad_(True),
    "frozen": lambda model: model.requires_grad_(False),
    "with notes": noted,
    "with a hook of its state dict": renamed,
    "widened": lambda model: model.double(),
}


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_model_keeps_its_radius(name: str) -> None:
    model, x, y = victim()
    before_B = certified_radius(model, x, y, "lofast")
    HONEST[name](model)
    torch.testing.assert_close(certified_radius(model, x, y, "lofast"), before_B, rtol=1e-6, atol=0)
    assert (before_B > 0).all()


def test_shared_modules_and_known_parametrisations_are_certified() -> None:
    model, x, _ = victim()
    tied(model)
    parametrize.register_parametrization(model.blocks[0].attn.proj, "weight", AOL())
    nn.utils.parametrizations.weight_norm(model.head)
    nn.utils.parametrizations.spectral_norm(model.blocks[0].mlp.fc1)
    y = model(x).argmax(-1)
    assert (certified_radius(model.eval(), x, y, "lofast") > 0).all()
