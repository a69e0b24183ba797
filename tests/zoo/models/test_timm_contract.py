"""timm's contract for every model of the registry, as timm's own tests/test_models.py asks for it.

Descriptions are compared at true sizes, everything else on tiny models with their own parts.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from timm.models import get_notrace_functions, get_notrace_modules, group_parameters, save_for_hf
from torch import Tensor, nn
from torchvision.models.feature_extraction import create_feature_extractor, get_graph_node_names

import zoo
from certizoo import UserError
from tests.tools.cases import mostly_slow
from tests.tools.small_models import distinct
from zoo.bounds.rule_table import NoRule
from zoo.models.overview import tiny_options
from zoo.weights import table

QUICK = ("cert_vit_c10", "conv_4c3f", "dp_convit_b", "dp_swin_b", "lofast_vit_c10")
CASES = mostly_slow(distinct(), *QUICK)


def tiny(name: str, **overrides: Any) -> Any:
    """Return timm's model of this name, shrunk."""
    torch.manual_seed(0)
    return timm.create_model(name, **tiny_options(name) | overrides)


def images(model: Any, batch: int = 2) -> Tensor:
    return torch.rand(batch, *model.pretrained_cfg["input_size"], generator=torch.Generator().manual_seed(1))


def axis(model: Any, features: Tensor) -> int:
    """Return the axis of the channels in the output of forward_features."""
    return 1 if features.ndim == 4 and not hasattr(model, "output_fmt") else -1


# --- descriptions ----------------------------------------------------------------------------------------------------


def test_every_name_describes_its_input() -> None:
    """Normalisation is a layer: a transform made from the description leaves pixels in [0,1]."""
    for name in zoo.list_models():
        options, cfg = zoo.model_options(name), timm.get_pretrained_cfg(name)
        chans, size = options["in_chans"], options["img_size"]
        assert cfg.input_size == (chans, size, size), name
        assert cfg.fixed_input_size, name
        assert (cfg.mean, cfg.std) == ((0.0,) * chans, (1.0,) * chans), name
        assert cfg.num_classes == options["num_classes"], name


def test_timm_lists_the_names_with_weights() -> None:
    ours = set(timm.list_models(pretrained=True)) & set(zoo.list_models())
    assert ours == set(table.entries())
    assert timm.list_models("cert_*", pretrained=True) == [name for name in table.entries() if name.startswith("cert_")]
    for name in ours:
        assert Path(timm.get_pretrained_cfg(name).file).is_file()


def test_timms_transform_gives_the_pixels_of_the_image() -> None:
    """A certificate speaks of pixels in [0,1]: timm must neither normalise nor crop them."""
    model = timm.create_model("cert_vit_c10", pretrained=True)
    pixels_HWC = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    for create in (timm.create_model, zoo.create_model):
        transform = timm.data.create_transform(**timm.data.resolve_model_data_config(create("cert_vit_c10")))
        found = transform(Image.fromarray(pixels_HWC))
        assert torch.equal(found, torch.from_numpy(pixels_HWC).permute(2, 0, 1) / 255)
    assert model.pretrained_cfg["num_classes"] == model.num_classes == 10


@pytest.mark.parametrize("name", CASES)
def test_a_model_is_what_its_description_says(name: str) -> None:
    """Compare with the model: the size of images and features, and the names of the first and the last layer."""
    text = "vocabulary" in zoo.model_options(name)
    gray: dict[str, Any] = {"in_chans": 1, "mean": (0.4,), "std": (0.2,)}
    gray |= {"embed_dim": tiny_options(name)["img_size"]} if text else {}
    model = tiny(name, **gray).eval()
    cfg, state, x = model.pretrained_cfg, model.state_dict(), images(model)
    ours: Any = zoo.create_model(name, **tiny_options(name) | gray)
    assert cfg == model.default_cfg == ours.pretrained_cfg
    assert cfg["input_size"] == (1, *(tiny_options(name)["img_size"],) * 2)
    features = model.forward_features(x)
    pre_logits = model.forward_head(features, pre_logits=True)
    assert features.shape[axis(model, features)] == model.num_features
    assert pre_logits.shape == (2, model.head_hidden_size)
    if cfg["pool_size"] is not None:
        spatial = [length for i, length in enumerate(features.shape) if i not in (0, axis(model, features) % 4)]
        assert spatial == list(cfg["pool_size"])
    assert model.get_submodule(cfg["classifier"]) is model.get_classifier()
    assert len(state[f"{cfg['classifier']}.weight"]) == cfg["num_classes"] == model.num_classes
    first = [cfg["first_conv"]] if isinstance(cfg["first_conv"], str) else cfg["first_conv"]
    assert all(state[f"{conv}.weight"].shape[1] == 1 for conv in first)
    assert bool(first) == (not text and not any(key.startswith("patch_embed.proj.parametrizations") for key in state))


# --- features --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_intermediates_are_the_outputs_of_the_modules_that_feature_info_names(name: str) -> None:
    model = tiny(name).eval()
    x, seen = images(model), dict[str, Tensor]()
    for info in model.feature_info:
        model.get_submodule(info["module"]).register_forward_hook(
            lambda _module, _inputs, y, key=info["module"]: seen.__setitem__(key, y)
        )
    with torch.no_grad():
        final, found = model.forward_intermediates(x)
        assert torch.equal(final, model.forward_features(x))
        early = model.forward_intermediates(x, [0], stop_early=True, intermediates_only=True)
    assert torch.equal(early[0], found[0])
    for info, state in zip(model.feature_info, found, strict=True):
        inside, size = seen[info["module"]], math.ceil(x.shape[-1] / info["reduction"])
        if inside.ndim == 3:  # tokens; one of the class stands before those of the patches
            inside = inside[:, -state[0, 0].numel() :].mT.reshape(state.shape)
        assert torch.equal(state, inside.movedim(-1, 1) if hasattr(model, "output_fmt") else inside)
        assert state.shape[1] == info["num_chs"]
        assert state.shape[-1] <= size  # convolutions without padding lose a border


@pytest.mark.parametrize("name", CASES)
def test_features_only_gives_the_last_intermediates(name: str) -> None:
    model, wrapped = tiny(name).eval(), tiny(name, features_only=True).eval()
    with torch.no_grad():
        found = wrapped(images(model))
        expected = model.forward_intermediates(images(model), len(found), intermediates_only=True)
    assert len(found) == min(3, len(model.feature_info))
    assert all(map(torch.equal, found, expected))
    assert wrapped.feature_info.channels() == [state.shape[1] for state in found]
    assert timm.data.resolve_model_data_config(wrapped)["mean"] == (0.0,) * images(model).shape[1]


def test_tokens_as_a_sequence_with_those_of_the_class() -> None:
    """ConViT's class token joins between its two blocks."""
    model = tiny("dp_convit_ti").eval()
    (patches, none), (_, one) = model.forward_intermediates(
        images(model), return_prefix_tokens=True, output_fmt="NLC", norm=True, intermediates_only=True
    )
    assert patches.shape == (2, 9, 24)
    assert (none.shape, one.shape) == ((2, 0, 24), (2, 1, 24))
    torch.testing.assert_close(one, model.forward_features(images(model))[:, :1])
    with pytest.raises(UserError, match="output_fmt is 'NHWC'; choose"):
        model.forward_intermediates(images(model), output_fmt="NHWC")


@pytest.mark.parametrize("name", CASES)
def test_fx_extracts_the_same_logits(name: str) -> None:
    model = tiny(name).eval()
    how = {"leaf_modules": get_notrace_modules(), "autowrap_functions": get_notrace_functions()}
    _, nodes = get_graph_node_names(model, tracer_kwargs=how)
    traced = create_feature_extractor(model, return_nodes={nodes[-1]: "logits"}, tracer_kwargs=how)
    with torch.no_grad():
        assert torch.equal(traced(images(model))["logits"], model(images(model)))


# --- heads -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_the_head_is_replaced_or_removed(name: str) -> None:
    model = tiny(name).eval()
    x = images(model)
    with torch.no_grad():
        features = model.forward_features(x)
        pre_logits = model.forward_head(features, pre_logits=True)
        model.reset_classifier(7)
        assert model(x).shape == (2, 7)
        assert model.get_classifier() is model.get_submodule(model.pretrained_cfg["classifier"])
        model.reset_classifier(0)
        torch.testing.assert_close(model(x), pre_logits)
        assert tiny(name, num_classes=0)(x).shape == pre_logits.shape
        if hasattr(model, "global_pool"):
            model.reset_classifier(0, "")
            torch.testing.assert_close(model(x), model.fc_norm(features) if hasattr(model, "fc_norm") else features)
            assert model.global_pool == ""
    with pytest.raises(NoRule):
        zoo.rules.classifier_of(model.requires_grad_(False))


def test_a_pooling_that_is_removed_keeps_the_published_head() -> None:
    whole, bare = (timm.create_model("cert_vit_c10", pretrained=True, **own) for own in ({}, {"global_pool": ""}))
    x = images(whole)
    torch.testing.assert_close(bare(x).mean(1), whole(x))
    with pytest.raises(NoRule, match="returns every token"):
        zoo.rules.classifier_of(bare.requires_grad_(False))


# --- training --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_recomputed_blocks_train_the_same_weights(name: str) -> None:
    """Logits, gradients and power vectors are those without checkpointing."""
    found: list[tuple[Any, Tensor]] = []
    for enable in (False, True):
        model = tiny(name).train()
        model.set_grad_checkpointing(enable)
        torch.manual_seed(3)  # stochastic depth
        logits = model(images(model, 4))
        logits.square().sum().backward()
        found.append((model, logits.detach()))
    (plain, expected), (model, actual) = found
    assert torch.equal(actual, expected)
    for (key, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, msg=key)
    for mine, theirs in zip(model.buffers(), plain.buffers(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("name", CASES)
def test_parameters_have_groups_from_first_to_last(name: str) -> None:
    """Layer-wise learning rates start at the stem, go block by block, and end at the head."""
    model, cfg = tiny(name), tiny(name).pretrained_cfg
    groups = list(group_parameters(model, model.group_matcher()).values())
    assert sorted(key for keys in groups for key in keys) == sorted(key for key, _ in model.named_parameters())
    assert f"{cfg['classifier']}.weight" in groups[-1]
    assert all(f"{conv}.weight" in groups[0] for conv in [cfg["first_conv"]] if isinstance(conv, str))
    blocks = [key for key, _ in model.named_parameters() if key.startswith(("blocks.", "convs.", "layers."))]
    places = [next(i for i, keys in enumerate(groups) if key in keys) for key in blocks]
    assert places == sorted(places)
    assert model.no_weight_decay() <= {"pos_embed", "cls_token"} | {key for key, _ in model.named_parameters()}


# --- weights of timm's own sources -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cert_vit_c10", "conv_4c3f", "dp_swin_t"])
def test_a_folder_that_timm_wrote_gives_the_model_again(name: str, tmp_path: Path) -> None:
    model = tiny(name).eval()
    nn.init.normal_(model.get_classifier().weight)
    save_for_hf(model, tmp_path)
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    with torch.no_grad():
        assert torch.equal(again(images(model)), model(images(model)))


def test_weights_that_timm_is_told_are_not_replaced_by_the_published_ones(tmp_path: Path) -> None:
    state = load_file(table.handover_of("cert_vit_c10") / table.WEIGHTS)
    save_file(state | {"head.bias": torch.arange(10.0)}, tmp_path / "own.safetensors")
    overlay = {"file": str(tmp_path / "own.safetensors")}
    model = timm.create_model("cert_vit_c10", pretrained=True, pretrained_cfg_overlay=overlay)
    assert torch.equal(model.head.bias, torch.arange(10.0))
    cropped = timm.create_model("cert_vit_c10", pretrained=True, pretrained_cfg_overlay={"crop_pct": 0.9})
    assert torch.equal(cropped.head.bias, state["head.bias"])
    assert cropped.pretrained_cfg["crop_pct"] == 0.9
    with pytest.raises(RuntimeError, match="Invalid pretrained tag"):
        timm.create_model("cert_vit_c10.other", pretrained=True)


@pytest.mark.parametrize(
    "own", [{"depth": -1}, {"img_size": (32, 64)}, {"img_size": "x"}, {"dept": 2}, {"drop_rate": 0.1}]
)
def test_timms_door_checks_options_as_ours_does(own: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=next(iter(own))):
        timm.create_model("cert_vit_c10", **own)


def test_what_timms_trainer_always_passes_is_taken() -> None:
    timm.create_model("dp_vit_ti", drop_rate=0.0, drop_path_rate=None, drop_block_rate=None, num_classes=None)
