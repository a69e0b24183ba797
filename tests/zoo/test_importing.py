"""`python -m zoo import`: checkpoints as other libraries write them; the oracle is the library's own model."""

import io
import json
import os
from argparse import Namespace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.utils import CheckpointSaver, ModelEmaV3
from torch import Tensor, nn
from torchvision.models import VisionTransformer

import zoo
from certizoo import UserError
from zoo.__main__ import main
from zoo.importing import import_checkpoint
from zoo.models.pretrained import read

SIZES: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": 7}
WORDS = [f"{key}={value}" for key, value in SIZES.items()]
State = dict[str, Tensor]


def randomised(model: Any) -> Any:
    """Draw every parameter, so that a part that is left out shows in the logits."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def timms(**more: Any) -> Any:
    return randomised(timm.create_model("vit_tiny_patch16_224", **(SIZES | more)))


@pytest.fixture(scope="module")
def theirs() -> Any:
    return timms()


@pytest.fixture(scope="module")
def state(theirs: Any) -> State:
    return dict(theirs.state_dict())


def imported(source: Path, out: Path, *words: str, model: str = "dp_vit_ti", ema: bool = False) -> tuple[str, Any]:
    """Return the line that is printed, and the model of the hand-over."""
    options = {key: json.loads(value) for key, _, value in (word.partition("=") for word in [*WORDS, *words])}
    said = import_checkpoint(str(source), model, out, options, ema)
    return said, zoo.handover.load(out)[0]


def differs(model: Any, other: Any) -> float:
    images = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return float((model(images) - other(model.normalize(images))).abs().max())


def refused(source: Path, *words: str, **more: Any) -> str:
    """Return the only line with which a file is refused. Nothing is written then."""
    out = source.parent / "refused"
    with pytest.raises(UserError) as error:
        imported(source, out, *words, **more)
    assert not out.exists()
    line = str(error.value)
    assert "\n" not in line
    assert "weights_only" not in line
    assert "allow_pickle" not in line
    return line


# what people have ------------------------------------------------------------


def lightning(state: State) -> dict[str, Any]:
    """Return the form of Lightning's Trainer.save_checkpoint."""
    return {
        "epoch": 3, "global_step": 9, "pytorch-lightning_version": "2.5.0", "loops": {},
        "callbacks": {"ModelCheckpoint": {"best": np.float64(0.5)}},
        "state_dict": {f"model.{key}": value for key, value in state.items()},
        "hyper_parameters": {"args": Namespace(lr=1e-3), "root": Path("data"), "other": PurePosixPath("x")},
    }  # fmt: skip


FORMS = {
    "plain": lambda state: state,
    "ddp": lambda state: {"model": {f"module.{key}": value for key, value in state.items()}},
    "compiled": lambda state: {f"_orig_mod.{key}": value for key, value in state.items()},
    "compiled in ddp": lambda state: {f"module._orig_mod.{key}": value for key, value in state.items()},
    "compiled block": lambda state: {key.replace("blocks.0.", "blocks.0._orig_mod."): state[key] for key in state},
    "lightning": lightning,
    "deepspeed": lambda state: {"module": state, "ds_version": "0.17", "param_shapes": [torch.Size([1])]},
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_torchs_files_keep_their_function(form: str, state: State, theirs: Any, tmp_path: Path) -> None:
    torch.save(FORMS[form](state), tmp_path / "w.ckpt")
    said, model = imported(tmp_path / "w.ckpt", tmp_path / "h")
    assert differs(model, theirs) < 1e-5
    assert "logits equal those of timm's VisionTransformer up to" in said
    assert "the file has none: --set mean= std=" in said


def test_real_wrappers_are_read(theirs: Any, tmp_path: Path) -> None:
    torch.save(torch.compile(nn.DataParallel(theirs)).state_dict(), tmp_path / "w.pt")  # type: ignore[attr-defined]
    assert differs(imported(tmp_path / "w.pt", tmp_path / "h")[1], theirs) < 1e-5


def test_arrays_are_read(state: State, theirs: Any, tmp_path: Path) -> None:
    arrays: dict[str, Any] = {key: value.numpy() for key, value in state.items()}
    np.savez(tmp_path / "w.npz", **arrays)
    assert differs(imported(tmp_path / "w.npz", tmp_path / "h")[1], theirs) < 1e-5


@pytest.mark.parametrize("given", [None, (0.1, 0.2, 0.3)])
def test_timms_checkpoint_brings_statistics_and_averaged_weights(given: Any, tmp_path: Path) -> None:
    """The saver of timm keeps a Namespace; its trainer normalises by the arguments, else as the architecture says."""
    theirs, averaged = timms(), ModelEmaV3(timms())
    for parameter in averaged.module.parameters():
        parameter.data *= 1.1
    args = Namespace(model="vit_tiny_patch16_224", mean=given, std=given, opt="sgd")
    saver = CheckpointSaver(theirs, torch.optim.SGD(theirs.parameters()), args, averaged, checkpoint_dir=str(tmp_path))
    saver.save_checkpoint(3, metric=0.5)
    path = tmp_path / "last.pth.tar"
    said, model = imported(path, tmp_path / "h")
    assert differs(model, theirs) < 1e-5
    assert "(--ema: those of state_dict_ema)" in said
    assert "mean and std: the file's" in said
    assert model.normalize.mean.flatten().tolist() == pytest.approx(given or (0.5, 0.5, 0.5))
    said, model = imported(path, tmp_path / "ema", ema=True)
    assert differs(model, averaged.module) < 1e-5
    assert "averaged weights" in said
    _, model = imported(path, tmp_path / "set", "mean=[0.4, 0.4, 0.4]", "std=[0.2, 0.2, 0.2]")
    assert model.normalize.mean.flatten().tolist() == pytest.approx([0.4] * 3)


def test_torchvisions_names_are_mapped(tmp_path: Path) -> None:
    theirs = randomised(VisionTransformer(32, 8, 2, 3, 48, 192, num_classes=7))
    torch.save(theirs.state_dict(), tmp_path / "w.pth")
    said, model = imported(tmp_path / "w.pth", tmp_path / "h")
    assert differs(model, theirs) < 1e-5
    assert "logits equal those of torchvision's VisionTransformer" in said


def in_hugging_faces_names(state: State) -> State:
    """Write timm's state dict under the names of ViTForImageClassification."""
    found: State = {}
    for key, value in state.items():
        parts = key.split(".")
        if parts[0] != "blocks":
            name = {"cls_token": "vit.embeddings.cls_token", "pos_embed": "vit.embeddings.position_embeddings"}.get(key)
            patches = "vit.embeddings.patch_embeddings.projection"
            start = {"patch_embed": patches, "norm": "vit.layernorm", "head": "classifier"}
            found[name or f"{start[parts[0]]}.{parts[-1]}"] = value
            continue
        layer, inside, leaf = f"vit.encoder.layer.{parts[1]}", ".".join(parts[2:-1]), parts[-1]
        if inside == "attn.qkv":
            for part, own in zip(("query", "key", "value"), value.chunk(3), strict=True):
                found[f"{layer}.attention.attention.{part}.{leaf}"] = own.clone()
            continue
        names = {
            "norm1": "layernorm_before", "norm2": "layernorm_after", "attn.proj": "attention.output.dense",
            "mlp.fc1": "intermediate.dense", "mlp.fc2": "output.dense",
        }  # fmt: skip
        found[f"{layer}.{names[inside]}.{leaf}"] = value
    return found


OF_VERSION_5 = {  # of transformers: in memory, not in the files that it saves
    "encoder.layer.": "layers.", "attention.attention.query": "attention.q_proj", "attention.attention.key":
    "attention.k_proj", "attention.attention.value": "attention.v_proj", "attention.output.dense": "attention.o_proj",
    "intermediate.dense": "mlp.fc1", "output.dense": "mlp.fc2",
}  # fmt: skip


@pytest.mark.parametrize("renamed", [{}, OF_VERSION_5])
def test_hugging_faces_names_are_mapped(renamed: dict[str, str], state: State, theirs: Any, tmp_path: Path) -> None:
    named = in_hugging_faces_names(state)
    for old, new in renamed.items():
        named = {key.replace(old, new): value for key, value in named.items()}
    save_file(named, tmp_path / "model.safetensors")
    said, model = imported(tmp_path / "model.safetensors", tmp_path / "h")
    assert differs(model, theirs) < 1e-5
    assert "logits not compared: transformers is not installed" in said or "of Hugging Face's ViTFor" in said


def test_real_hugging_face_models_are_compared(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is no dependency")
    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 192}
    config = transformers.ViTConfig(**sizes, image_size=32, patch_size=8, num_labels=7, layer_norm_eps=1e-6)
    model = randomised(transformers.ViTForImageClassification(config))
    model.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "w.pth")
    for name in ("model.safetensors", "w.pth"):
        assert "logits equal those of Hugging Face's" in imported(tmp_path / name, tmp_path / f"of {name}")[0]


def test_hugging_faces_configuration_is_used(state: State, tmp_path: Path) -> None:
    """Heads, eps and pixel statistics are outside of the state dict, in files beside it."""
    path, norm = tmp_path / "model.safetensors", 'norm={"name": "layernorm", "eps": 1e-12}'
    save_file(in_hugging_faces_names(state), path)
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 3, "layer_norm_eps": 1e-12}))
    pixels = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.5, 0.5]}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(pixels))
    assert "eps 1.0e-12, the model has 1.0e-06; set norm={name: layernorm, eps: 1.0e-12}" in refused(path)
    assert "has heads [3, 3], the model has [4, 4]" in refused(path, norm, "num_heads=4")
    said, model = imported(path, tmp_path / "h", norm)
    assert "mean and std: the file's" in said
    assert model.normalize.mean.flatten().tolist() == pytest.approx([0.5, 0.4, 0.3])


SWIN = {"img_size": 56, "embed_dim": 24, "depths": [2, 2], "num_heads": [2, 4]}
CONVIT = {"img_size": 32, "patch_size": 8, "depth": 3, "num_heads": 4}


@pytest.mark.parametrize(
    ("name", "ours", "architecture", "sizes"),
    [
        ("dp_swin_t", SWIN, "swin_tiny_patch4_window7_224", SWIN),
        ("dp_convit_ti", CONVIT | {"embed_dim": 48, "gpsa_layers": 2},
         "convit_tiny", CONVIT | {"embed_dim": 12, "local_up_to_layer": 2}),
        ("dp_vit_s1", {"img_size": 32, "embed_dim": 24}, "vit_tiny_patch16_224",
         {"img_size": 32, "embed_dim": 24, "depth": 1, "num_heads": 1, "num_classes": 10, "global_pool": "avg",
          "class_token": False, "fc_norm": True, "norm_layer": nn.LayerNorm}),
    ],
)  # fmt: skip
def test_other_architectures_are_compared_too(
    name: str, ours: dict[str, Any], architecture: str, sizes: dict[str, Any], tmp_path: Path
) -> None:
    torch.save(randomised(timm.create_model(architecture, **sizes)).state_dict(), tmp_path / "w.pt")
    assert "logits equal those of timm's" in import_checkpoint(str(tmp_path / "w.pt"), name, tmp_path / "h", ours)


def test_our_own_weights_have_no_other_library(tmp_path: Path) -> None:
    model = randomised(zoo.create_model("cert_vit_c10"))
    torch.save(model.state_dict(), tmp_path / "w.pt")
    said = import_checkpoint(str(tmp_path / "w.pt"), "cert_vit_c10", tmp_path / "h", {})
    assert "logits not compared: the file has certizoo's own names" in said
    loaded, config = zoo.handover.load(tmp_path / "h")
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in loaded.state_dict().items())
    assert config["pretrained"].startswith("w.pt#sha256=")


def test_logits_that_say_nothing_are_not_compared(tmp_path: Path) -> None:
    """A new model of torchvision has a head of zeros, so any function would have its logits."""
    torch.save(VisionTransformer(32, 8, 2, 3, 48, 192, num_classes=7).state_dict(), tmp_path / "w.pth")
    assert "logits not compared: they are equal for every image" in imported(tmp_path / "w.pth", tmp_path / "h")[0]


# what is refused ------------------------------------------------------------


class Planted:
    """An object that would run code if it were unpickled."""

    def __reduce__(self) -> Any:
        return (os.mkdir, ("planted",))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit
def test_code_is_named_and_never_run(state: State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    scripted = torch.jit.trace(nn.Linear(2, 2), torch.zeros(1, 2))
    for content, words in (
        ({"model": nn.Linear(2, 2)}, "it holds torch.nn.modules.linear.Linear, and code is never run"),
        ({"state_dict": state, "hyper_parameters": {"loss": nn.MSELoss()}}, "torch.nn.modules.loss.MSELoss"),
        ({"state_dict": state, "x": Planted()}, "it holds posix.mkdir, and code is never run"),
        (scripted, "it is a TorchScript program"),
    ):  # fmt: skip
        path = tmp_path / "w.pt"
        torch.jit.save(content, path) if content is scripted else torch.save(content, path)
        line = refused(path)
        assert words in line
        assert "save_file(model.state_dict()" in line
    assert not (tmp_path / "planted").exists()


def written(content: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def test_files_that_hold_no_weights_are_named(state: State, tmp_path: Path) -> None:
    whole = written(state)
    save_file(state, tmp_path / "whole.safetensors")
    np.savez(tmp_path / "objects.npz", a=np.array([None], dtype=object))
    jax: dict[str, Any] = {"Transformer/encoderblock_0/x": np.ones(3)}
    np.savez(tmp_path / "jax.npz", **jax)
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n"
    for name, content, words in (
        ("a.pth", b"", "is empty (0 bytes)"),
        ("b.pth", pointer, "is a Git LFS pointer, not the weights; run `git lfs pull`"),
        ("b.safetensors", pointer, "is a Git LFS pointer"),
        ("c.pth", whole[: len(whole) // 2], "damaged or cut off"),
        ("d.safetensors", (tmp_path / "whole.safetensors").read_bytes()[:5000], "damaged or cut off"),
        ("e.npz", b"PK\x03\x04" + bytes(50), "damaged or cut off"),
        ("f.pth", written([1, 2]), "does not hold a state dict"),
        ("g.pth", written({"optimizer": {}, "epoch": 3}), "does not hold a state dict: optimizer is a dict"),
        ("objects.npz", None, "holds more than arrays of numbers"),
        ("jax.npz", None, "has JAX's names; let timm convert it"),
    ):  # fmt: skip
        if content is not None:
            (tmp_path / name).write_bytes(content)
        assert words in refused(tmp_path / name), name
    assert f"{tmp_path} is a folder; give a file of weights in it: " in refused(tmp_path)
    assert "does not exist" in refused(tmp_path / "absent.pth")


def test_weights_that_are_none_are_refused_by_name(state: State, tmp_path: Path) -> None:
    key, path = "blocks.1.mlp.fc1.weight", tmp_path / "w.pth"
    wrong = state[key].clone()
    wrong[0, 0] = float("nan")
    for value, words in (
        (wrong, f"{key} holds NaN"),
        (state[key].double() * 1e300, f"{key} holds NaN or infinity in float32"),
        (torch.empty(0), f"{key} has no values, shape (0,); if ZeRO-3 divided them"),
        (state[key].to(torch.int8), f"{key} is torch.int8, as in quantised models"),
        (state[key].to_sparse(), f"{key} is torch.sparse_coo"),
        (torch.zeros(1, 1).expand(192, 48), f"{key} repeats its values"),
        (state[key][:, :40].clone(), f"{key} is (192, 40) in the weights and (192, 48) in the model"),
    ):
        torch.save(state | {key: value}, path)
        assert words in refused(path)
    torch.save({name: value for name, value in state.items() if name != key}, path)
    assert f"the weights have no {key}" in refused(path)
    torch.save(state | {"blocks.7.x": torch.ones(2)}, path)
    assert "the weights have blocks.7.x, but the model does not" in refused(path)
    torch.save(state | {f"module.{key}": torch.ones(2)}, path)
    assert f"holds {key} twice" in refused(path)
    torch.save(state, path)
    assert "has no averaged weights" in refused(path, ema=True)


def test_another_function_is_refused(state: State, tmp_path: Path) -> None:
    """Neither the head nor positions are changed silently. Heads show in the logits alone."""
    path = tmp_path / "w.pth"
    torch.save(state, path)
    assert "head keeps its initial values (7 classes there, 10 here)" in refused(path, "num_classes=10")
    assert "resampled: pos_embed" in refused(path, "img_size=64")
    assert "dot products became distances" in refused(path, model="l2_vit_ti")
    arguments = Namespace(model="vit_tiny_patch16_224", mean=None, std=None)
    full = timm.create_model("vit_tiny_patch16_224", num_classes=7).state_dict()
    torch.save({"state_dict": full, "args": arguments, "arch": "vit", "version": 2, "epoch": 1}, path)
    with pytest.raises(
        UserError, match=r"the logits differ from those of timm's vit_tiny_patch16_224 by .*num_heads=N"
    ):
        import_checkpoint(str(path), "dp_vit_ti", tmp_path / "h", {"num_classes": 7, "num_heads": 6})
    assert not (tmp_path / "h").exists()


# the command ------------------------------------------------------------


def test_the_command_writes_a_hand_over_once(state: State, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file(state, tmp_path / "w.safetensors")
    words = [
        "import",
        str(tmp_path / "w.safetensors"),
        "--model",
        "dp_vit_ti",
        "--out",
        str(tmp_path / "run" / "handover"),
    ]
    main([*words, "--set", *WORDS])
    (line,) = capsys.readouterr().out.splitlines()
    assert "logits equal those of timm's VisionTransformer" in line
    with pytest.raises(SystemExit):
        main([*words, "--set", *WORDS])
    assert "exists and is not empty; give another folder" in capsys.readouterr().err
    assert zoo.handover.folder_of(tmp_path / "run") == tmp_path / "run" / "handover"
    main(["export", str(tmp_path / "run"), str(tmp_path / "x.safetensors"), "--format", "timm"])
    exported = read(tmp_path / "x.safetensors").state
    assert all(torch.equal(value, exported[key]) for key, value in state.items())
