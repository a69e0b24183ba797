"""Foreign hand-overs: the config's demands are bounded by the weights present, and open no other file."""

import json
import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

import zoo
from certizoo import UserError
from tests.tools.cases import mostly_slow

SECONDS = 10
SMALL: dict[str, Any] = {"name": "spec_vit_digits", "depth": 1, "embed_dim": 8}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    zoo.handover.save(tmp_path, zoo.create_model(**SMALL), SMALL, {"seed": 0})
    return tmp_path


def change(folder: Path, options: dict[Any, Any]) -> None:
    path = folder / "config.yaml"
    config = yaml.safe_load(path.read_text())
    config["model"] |= options
    path.write_text(yaml.safe_dump(config))


def refusal(folder: Path) -> str:
    start = time.monotonic()
    with pytest.raises(UserError) as caught:
        zoo.handover.load(folder)
    assert time.monotonic() - start < SECONDS
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert len(message) < 1000
    assert ";" in message or ":" in message
    return message


def nested(depth: int) -> list:
    value: list = []
    for _ in range(depth):
        value = [value]
    return value


OPTIONS: dict[str, dict[Any, Any]] = {
    "depth of 10^7": {"depth": 10**7},
    "depth of 500": {"depth": 500},
    "depth below 0": {"depth": -1},
    "depth as text": {"depth": "1"},
    "depth as a number with a point": {"depth": 1.0},
    "depth true": {"depth": True},
    "depth null": {"depth": None},
    "width of 4 10^5": {"embed_dim": 400_000},
    "width of 65,536": {"embed_dim": 65_536, "num_heads": 1},
    "width 0": {"embed_dim": 0},
    "width that its heads do not share": {"num_heads": 3},
    "no heads": {"num_heads": 0},
    "more heads than width": {"num_heads": 65_536},
    "10^9 classes": {"num_classes": 10**9},
    "10^6 classes": {"num_classes": 10**6},
    "no classes": {"num_classes": 0},
    "classes NaN": {"num_classes": float("nan")},
    "image of 10^6 pixels a side": {"img_size": 10**6},
    "image of 2048 in patches of 1": {"img_size": 2048, "patch_size": 1},
    "image in 256 x 256 patches": {"img_size": 256, "patch_size": 1},
    "image below 0": {"img_size": -8},
    "image as a list": {"img_size": [8, 8]},
    "patches of 0": {"patch_size": 0},
    "patches below 0": {"patch_size": -4},
    "10^5 channels": {"in_chans": 10**5},
    "channels NaN": {"in_chans": float("nan")},
    "ratio of 10^9": {"mlp_ratio": 1e9},
    "ratio NaN": {"mlp_ratio": float("nan")},
    "ratio inf": {"mlp_ratio": float("inf")},
    "ratio 0": {"mlp_ratio": 0.0},
    "bias as text": {"bias": "false"},
    "mean of 10^4 channels": {"mean": [0.5] * 10_000},
    "std 0": {"std": [0.0]},
    "std NaN": {"std": [float("nan")]},
    "mean as text": {"mean": "0.5"},
    "an unknown name": {"name": "no_such_model"},
    "a name that is a list": {"name": ["spec_vit_digits"]},
    "a name that is a path": {"name": "../../../etc/passwd"},
    "a name that moves the cursor": {"name": "\x1b[2J"},
    "another model": {"name": "conv_4c3f"},
    "an unknown option": {"colour": 1},
    "an option that is no text": {5: 1},
    "weights from a file": {"pretrained": "/etc/passwd"},
    "weights from the network": {"pretrained": "vit_base_patch16_224.augreg2_in21k_ft_in1k"},
    "weights from a hub": {"pretrained": "hf-hub:somebody/something"},
    "an attention that is a number": {"attention": 3},
    "an attention without a name": {"attention": {"q_cap": 1.0}},
    "an attention of an unknown name": {"attention": "builtins.eval"},
    "an attention with an unknown option": {"attention": {"name": "dp", "checkpoint_path": "/etc/passwd"}},
    "a part with a deep option": {"norm": {"name": "layernorm", "eps": nested(20)}},
    "a part on another device": {"norm": {"name": "layernorm", "device": "meta"}},
    "a part of another type": {"norm": {"name": "layernorm", "dtype": "float16"}},
    "a part whose activation is a name": {"mlp": {"name": "gelu", "act_layer": "os.system"}},
    "a cap NaN": {"attention": {"name": "dp", "q_cap": float("nan")}},
    "kernels of 10^8": {"attention": {"name": "conv", "kernels": [10**8 + 1, 3]}},
    "an init of another name": {"init": "eval"},
    "a block of another name": {"block": "__import__"},
    "a backbone of another name": {"backbone": "os"},
}


@pytest.mark.hostile
@pytest.mark.parametrize("name", mostly_slow(OPTIONS, *(OPTIONS.keys() - {"depth of 500"})))
def test_a_config_that_asks_for_another_model_is_refused_before_it_is_built(name: str, folder: Path) -> None:
    change(folder, OPTIONS[name])
    refusal(folder)


@pytest.mark.hostile
@pytest.mark.parametrize("model", ["x", 5, None, [], ["name"], {}, {"name": None}, {"name": {}}, {"name": 5}, {5: 5}])
def test_a_config_without_a_model_is_refused(model: Any, folder: Path) -> None:
    (folder / "config.yaml").write_text(yaml.safe_dump({"model": model}))
    assert "config.yaml" in refusal(folder)


@pytest.mark.hostile
@pytest.mark.parametrize(
    "text",
    ["", "model", "[]", "5", "model: &a [*a]", "model: !!python/name:os.system ''", "\0", "model: " + "[" * 10**5],
)
def test_a_config_that_is_none_is_refused(text: str, folder: Path) -> None:
    (folder / "config.yaml").write_text(text)
    assert "config.yaml" in refusal(folder)


def raw(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def tensor(shape: list[int], start: int, stop: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


LARGE = "200,000 empty tensors"
FILES: dict[str, Callable[[], bytes]] = {
    "nothing": lambda: b"",
    "header of 2^63 bytes": lambda: raw({}, length=2**63),
    "header of 90 MB that is not there": lambda: raw({}, length=90_000_000),
    "header that is no JSON": lambda: raw(b"{" * 1000),
    "header of 10^5 levels": lambda: raw(b"[" * 100_000),
    "no tensors": lambda: raw({}),
    "tensor of 2^60 values": lambda: raw({"head.weight": tensor([2**60], 0, 4)}, bytes(4)),
    "tensor of 2^40 by 2^40 values": lambda: raw({"head.weight": tensor([2**40, 2**40], 0, 4)}, bytes(4)),
    "tensor of negative size": lambda: raw({"head.weight": tensor([-1], 0, 4)}, bytes(4)),
    "tensors one over the other": lambda: raw({"a": tensor([2], 0, 8), "b": tensor([2], 4, 12)}, bytes(12)),
    "tensor beyond the file": lambda: raw({"a": tensor([2**20], 0, 2**22)}, bytes(4)),
    "50,000 empty tensors": lambda: raw({f"t{n}": tensor([0], 0, 0) for n in range(50_000)}),
    LARGE: lambda: raw({f"t{n}": tensor([0], 0, 0) for n in range(200_000)}),
    "a pickle": lambda: b"\x80\x04cos\nsystem\n(S'true'\ntR.",
    "a zip": lambda: b"PK\x03\x04" + bytes(100),
}


@pytest.mark.hostile
@pytest.mark.parametrize("name", mostly_slow(FILES, *FILES.keys() - {LARGE}))
def test_files_that_are_not_weights_are_refused(name: str, folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(FILES[name]())
    assert "model.safetensors" in refusal(folder)


@pytest.mark.hostile
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.bool])
def test_weights_of_another_type_are_refused(dtype: torch.dtype, folder: Path) -> None:
    """Otherwise they would be widened or truncated silently."""
    path = folder / "model.safetensors"
    save_file({key: value.to(dtype) for key, value in load_file(path).items()}, path)
    assert "float32" in refusal(folder)


@pytest.mark.hostile
@pytest.mark.parametrize("act", ["one more", "one less", "another shape", "another name"])
def test_weights_of_another_model_are_refused(act: str, folder: Path) -> None:
    path = folder / "model.safetensors"
    state = load_file(path)
    if act == "one more":
        state["\x1b[2Jx"] = torch.zeros(1)
    elif act == "one less":
        del state["head.bias"]
    elif act == "another shape":
        state["head.bias"] = torch.zeros(2**20)
    else:
        state["tail.bias"] = state.pop("head.bias")
    save_file(state, path)
    assert "is not a checkpoint of spec_vit_digits" in refusal(folder)


BOUNDED = """
import resource, sys
from pathlib import Path
import zoo
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**29, used + 2**29))
try:
    zoo.handover.load(Path(sys.argv[1]))
except zoo.handover.UserError as error:
    print("refused:", error)
"""


@pytest.mark.hostile
@pytest.mark.parametrize(
    "options",
    mostly_slow(
        (
            {"embed_dim": 65_536, "num_heads": 1},
            {"img_size": 2048, "patch_size": 8, "embed_dim": 4096},
            {"num_classes": 10**6, "embed_dim": 65_536},
            {"name": "conv_4c3f", "img_size": 2048},
        ),
        {"num_classes": 10**6, "embed_dim": 65_536},
    ),
)
def test_what_the_weights_do_not_hold_takes_no_memory(options: dict[str, Any], folder: Path) -> None:
    config = {"model": {**SMALL, **options}} if "name" not in options else {"model": options}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    done = subprocess.run(
        [sys.executable, "-c", BOUNDED, str(folder)], capture_output=True, text=True, env={**os.environ}
    )
    assert done.stdout.startswith("refused: "), done.stderr[-1000:]


@pytest.mark.hostile
def test_a_window_as_large_as_the_image_takes_no_memory(tmp_path: Path) -> None:
    """A Swin's masks are not weights: 11 TB that no file contains."""
    (tmp_path / "model.safetensors").write_bytes(raw({}))
    model = {"name": "dp_swin_t", "img_size": 1024, "window_size": 256}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"model": model}))
    refusal(tmp_path)


def test_what_was_saved_is_loaded(folder: Path) -> None:
    model, config = zoo.handover.load(folder)
    assert config["model"]["embed_dim"] == 8
    assert model(torch.zeros(2, 1, 8, 8)).shape == (2, 10)
