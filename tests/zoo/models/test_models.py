"""Every model of the registry equals its slow oracle, trains, round-trips, and has its published size.

All models are enumerated, each with its own parts at a tiny size (`tiny_options`); true sizes are built without memory
for their weights.
"""

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

import zoo
import zoo.attention
from tests.tools import oracles
from tests.tools.cases import mostly_slow
from tests.tools.small_models import distinct
from zoo.layers.fold import folded
from zoo.models.overview import tiny_options

MODELS = zoo.list_models()
SHRUNK = distinct()  # shrunk, l2_vit_s and l2_vit_b are one model


def tiny(name: str, seed: int = 0, **overrides: Any) -> Any:
    """Return the model with its own parts, shrunk."""
    torch.manual_seed(seed)
    return zoo.create_model(name, **tiny_options(name) | overrides)


def images(name: str, batch: int = 2, **overrides: Any) -> Tensor:
    options = zoo.model_options(name, **tiny_options(name) | overrides)
    shape = (batch, options["in_chans"], options["img_size"], options["img_size"])
    return torch.rand(shape, generator=torch.Generator().manual_seed(1))


def stirred(model: Any) -> Any:
    """Perturb every parameter, so that biases, affine weights, gates, tables and thresholds are no longer 0 or 1."""
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


# --- the published definitions ---------------------------------------------------------------------------------------

# Parts that no name of the registry has, or has everywhere.
PARTS: list[tuple[str, dict[str, Any]]] = [
    ("scsa_vit_ti", {"norm": "centernorm", "block": "postnorm", "residual": {"name": "weighted", "bound": 0.1}}),
    ("scsa_convit_ti", {"attention": {"name": "scsa", "tau": 3.0, "nu": 0.5, "eps": 0.7}, "residual": "weighted"}),
    ("l2_vit_ti", {"attention": {"name": "l2", "tied": False}, "norm": "smoothproject"}),
    ("l2_swin_t", {"attention": {"name": "l2", "tied": False}, "window_size": 4, "img_size": 16}),
    ("dp_vit_ti", {"attention": {"name": "dp", "scale": 0.3}, "attn_norm": {"name": "layerproject", "radius": 0.5}}),
    ("dp_vit_ti", {"bias": False, "qkv_bias": False, "mlp": "sll_tanh", "block": "normfirst"}),
    ("dp_convit_ti", {"global_pool": "avg", "fc_norm": True}),
    ("dp_vit_ti", {"stem": (6,)}),
    ("dp_convit_ti", {"stem": (6,), "bias": False}),
    ("dp_vit_ti", {"stem": ((5, 4, 2, 1),)}),
    ("dp_vit_ti", {"stem": ((5, 3, 1, 1), (6, 6, 4, 1)), "bias": False}),
    ("lofast_vit_c10", {"mlp": "aol_relu", "patch_cap": None, "patch_constraint": "orthogonal"}),
    ("lofast_vit_c10", {"mlp": "orthogonal_tanh", "patch_cap": None, "patch_constraint": "aol"}),
    ("lofast_vit_c10", {"mlp": "capped_relu", "global_pool": "cls"}),
]


@pytest.mark.parametrize(("name", "own"), [*((name, {}) for name in SHRUNK), *PARTS], ids=str)
def test_every_model_equals_its_slow_definition(name: str, own: dict[str, Any]) -> None:
    """Compare in float64 with non-trivial weights. The oracle follows the papers and shares no code with the zoo."""
    model = stirred(tiny(name, **own).double()).eval()
    x = images(name, **own).double()
    options = zoo.model_options(name, **tiny_options(name) | own)
    with torch.no_grad():
        expected = oracles.logits(options, folded(model).state_dict(), x)
        actual = model(x)
    assert expected.std() > 1e-3, "the weights are too dull to tell one model from another"
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


def test_oracles_tell_variants_apart() -> None:
    """With another variant's equation the comparison above fails for the same weights."""
    name, x = "dp_vit_ti", images("dp_vit_ti").double()
    state = stirred(tiny(name).double()).state_dict()
    options = zoo.model_options(name, **tiny_options(name))
    changes: list[dict[str, Any]] = [
        {"attention": "scsa"}, {"attention": "ln"}, {"attention": {"name": "dp", "scale": 0.36}},
        {"norm": {"name": "layernorm", "eps": 1e-2}}, {"norm": "centernorm"}, {"block": "postnorm"},
    ]  # fmt: skip
    with torch.no_grad():
        right = oracles.logits(options, state, x)
        for change in changes:
            assert not torch.allclose(right, oracles.logits(options | change, state, x), rtol=1e-6), change


# --- training and keeping --------------------------------------------------------------------------------------------

# Their gradient is zero: a softmax ignores a constant added to a whole row.
WITHOUT_EFFECT = ("pos_proj.bias",)
OF_THE_INPUT = ("patch_embed.words",)  # the embedding makes the input: tests/zoo/models/test_sentences.py trains it


def train(model: Any, x: Tensor, steps: int, lr: float = 1e-3) -> list[float]:
    """Return the loss before and after each of some steps on the same images."""
    labels = torch.arange(len(x)) % model.num_classes
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0)
    losses = []
    for _ in range(steps):
        loss = F.cross_entropy(model.train()(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return [*losses, float(F.cross_entropy(model(x), labels).detach())]


@pytest.mark.parametrize("name", SHRUNK)
def test_every_model_trains(name: str) -> None:
    """One step on 2 images moves every parameter with finite gradients; a few more lower the loss."""
    still: dict[str, Any] = {"drop_path_rate": 0.0} if "drop_path_rate" in zoo.model_options(name) else {}
    model, x = tiny(name, **still), images(name)
    if zoo.model_options(name).get("theta"):  # signals strong enough to reach the thresholds of every layer
        with torch.no_grad():
            for key, value in model.named_parameters():
                value.mul_(4 if key.endswith("weight") else 0.5)
    of_logits = [(key, value) for key, value in model.named_parameters() if key not in OF_THE_INPUT]
    before = {key: value.detach().clone() for key, value in of_logits}
    first = train(model, x, 1)
    for key, value in of_logits:
        assert value.requires_grad, key
        assert value.grad is not None, f"{key} has no part in the logits"
        assert value.grad.isfinite().all(), key
        assert not torch.equal(value, before[key]) or key.endswith(WITHOUT_EFFECT), f"{key} does not move"
    losses = first + train(model, x, 4)
    assert all(torch.tensor(losses).isfinite())
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", SHRUNK)
def test_every_model_round_trips(name: str, tmp_path: Path) -> None:
    """Saved weights in another instance give the same logits bit for bit."""
    model, x = stirred(tiny(name)).eval(), images(name)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    other = tiny(name, seed=7).eval()
    with torch.no_grad():
        assert not torch.equal(other(x), model(x))
        other.load_state_dict(load_file(tmp_path / "model.safetensors"))
        assert torch.equal(other(x), model(x))


@pytest.mark.parametrize("name", SHRUNK)
def test_every_model_is_the_head_of_its_features_and_has_one_return_type(name: str) -> None:
    model, x = tiny(name).eval(), images(name, 3)
    logits = model(x)
    assert logits.shape == (3, 5)
    torch.testing.assert_close(model.forward_head(model.forward_features(x)), logits)
    assert type(model.train()(x)) is type(logits)


@pytest.mark.parametrize("name", [name for name in SHRUNK if zoo.model_options(name).get("global_pool") == "cls"])
def test_a_pooled_class_token_is_all_that_the_last_block_answers_for(name: str) -> None:
    """Logits and gradients equal those with all tokens, with drop-path too, since random draws agree."""
    model, x = stirred(tiny(name, drop_path_rate=0.5)).double().train(), images(name, 6).double()
    tokens: list[int] = []
    handle = model.blocks[-1].mlp.register_forward_hook(lambda module, given, y: tokens.append(y.shape[1]))
    logits, gradients = [], []
    for whole in (False, True):
        torch.manual_seed(3)
        logits.append(model.forward_head(model.forward_features(x)) if whole else model(x))
        gradients.append(torch.autograd.grad(logits[-1].square().sum(), [*model.parameters()], allow_unused=True))
    handle.remove()
    assert tokens[0] == 1 < tokens[1]
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", mostly_slow(MODELS, *SHRUNK))
def test_timm_creates_the_same_model(name: str) -> None:
    ours = tiny(name).state_dict()
    torch.manual_seed(0)
    theirs = timm.create_model(name, **tiny_options(name)).state_dict()
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        assert torch.equal(value, theirs[key]), key


# --- true sizes ------------------------------------------------------------------------------------------------------

COUNTS = {
    # CertViT, Table 1. The ViTs: no other depth and MLP ratio gives its counts.
    "l2_certvit_mnist": 1_094_528,
    "l2_certvit_c10": 4_086_912,
    "l2_certvit_c100": 4_916_736,
    "l2_certvit_tin": 9_060_864,
    "conv_4c3f_mnist": 1_973_536,
    "conv_4c3f": 2_528_096,
    "conv_6c2f": 2_360_672,
    "conv_8c2f": 2_436_864,
    "conv_8c2f_tin": 5_257_984,
    # From the cards of the published models.
    "dp_vit_b": 86_567_656,
    "dp_swin_t": 28_288_354,
}
TIMMS = {
    **{
        f"dp_vit_{s}": f"vit_{t}_patch16_224"
        for s, t in (("ti", "tiny"), ("s", "small"), ("b", "base"), ("l", "large"))
    },
    **{f"dp_vit_{s}_p8": f"vit_{t}_patch8_224" for s, t in (("s", "small"), ("b", "base"))},
    **{f"dp_vit_{s}_p32": f"vit_{t}_patch32_224" for s, t in (("s", "small"), ("b", "base"), ("l", "large"))},
    **{f"dp_deit_{s}": f"deit_{t}_patch16_224" for s, t in (("ti", "tiny"), ("s", "small"), ("b", "base"))},
    **{f"dp_convit_{s}": f"convit_{t}" for s, t in (("ti", "tiny"), ("s", "small"), ("b", "base"))},
    **{
        f"dp_swin_{s}": f"swin_{t}_patch4_window7_224"
        for s, t in (("t", "tiny"), ("s", "small"), ("b", "base"), ("l", "large"))
    },
}


def count(model: Any) -> int:
    return sum(p.numel() for p in model.parameters())


def kinds(model: Any) -> set[str]:
    return {type(module).__name__ for module in model.modules()}


@pytest.mark.parametrize("name", mostly_slow(MODELS, *SHRUNK))
def test_every_true_size_is_the_published_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """True sizes are built without memory; the tests above used the same models, shrunk."""
    # Drawing random weights is skipped: it would take most of a second for each model.
    monkeypatch.setattr("timm.layers.weight_init._trunc_normal_", lambda tensor, *_: tensor)
    with torch.device("meta"):
        model, small = zoo.create_model(name), zoo.create_model(name, **tiny_options(name))
        theirs = timm.create_model(TIMMS[name], num_classes=1000) if name in TIMMS else None
    assert {tensor.device.type for tensor in model.state_dict().values()} == {"meta"}
    assert count(model) == COUNTS.get(name, count(model))
    if theirs is not None:
        assert count(model) == count(theirs)
    assert kinds(small) == kinds(model)
    assert count(small) < 60_000


def test_no_model_is_left_out() -> None:
    assert sorted(name for names in SHRUNK.values() for name in names) == MODELS


def test_published_sizes_belong_to_models() -> None:
    assert set(COUNTS) | set(TIMMS) <= set(MODELS)


def test_sizes_of_paper_000() -> None:
    """Appendix F.2: ViT-S 8 blocks, 8 heads, width 768; DeiT-Ti 12, 3, 192; ConViT-Ti 10 layers, 4 heads of 48."""
    for variant in ("dp", "l2", "scsa", "ln", "spec"):
        vit_s, deit, convit = (
            zoo.model_options(f"{variant}_{size}") for size in ("vit_s_w768", "deit_ti", "convit_ti")
        )
        assert (vit_s["depth"], vit_s["num_heads"], vit_s["embed_dim"]) == (8, 8, 768)
        assert (deit["depth"], deit["num_heads"], deit["embed_dim"]) == (12, 3, 192)
        assert (convit["gpsa_layers"], convit["num_heads"], convit["embed_dim"] // convit["num_heads"]) == (10, 4, 48)


TRUE_SIZES = ("dp_vit_ti", "ln_vit_s_w768", "scsa_deit_s", "l2_convit_ti", "dp_swin_t", "l2_swin_t", "covit_l2",
              "l2_certvit_tin", "lofast_vit_w384_l12", "conv_8c2f_tin", "lips_vit_ti")  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", TRUE_SIZES)
def test_true_sizes_train(name: str) -> None:
    options = zoo.model_options(name)
    torch.manual_seed(0)
    losses = train(zoo.create_model(name), torch.rand(2, options["in_chans"], *(options["img_size"],) * 2), 2, lr=1e-4)
    assert all(torch.tensor(losses).isfinite())
    assert losses[-1] < losses[0]
