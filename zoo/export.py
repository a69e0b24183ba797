"""Models for other programs: state dicts in timm's names or ours, and programs that do not need this package.

Parametrised weights are folded, so that the exported function is the served one. A program takes images in [0,1].
timm's models take normalised images, and the file's metadata has the statistics (mean, std).
"""

import importlib.util
import io
import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from certizoo import UserError
from certizoo.files import whole_file
from certizoo.nearest import unknown
from zoo import handover
from zoo.layers.fold import folded
from zoo.models.convert import to_timm
from zoo.models.factory import input_size

Shape = tuple[int, int, int]


def export(model: nn.Module, path: Path, format: str, image: Shape) -> None:
    """Write `model` to the file `path`, whole or not at all.

    Args:
        model: the model to export.
        path: the file to write.
        format: 'timm' (safetensors, for `timm.create_model(..., checkpoint_path=)`), 'safetensors' (our names),
            'torch' (a torch.export program, any batch size), 'onnx' (any batch size; needs extra packages).
        image: channels, height, width.

    Raises:
        UserError: if the model has no such form, or a package is missing.
    """
    if format not in FORMATS:
        raise unknown("export format", format, FORMATS)
    plain = folded(model).cpu().requires_grad_(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as part:
        FORMATS[format](plain, part, torch.zeros(2, *image))


def export_handover(folder: Path, path: Path, format: str) -> None:
    """Export the hand-over in `folder`; see `export`."""
    model, config = handover.load(folder)
    export(model, path, format, input_size(config["model"]))


def _timm(model: nn.Module, path: Path, images_BCHW: Tensor) -> None:
    state = {key: value.contiguous() for key, value in to_timm(model).items()}
    statistics = model.get_submodule("normalize")
    metadata = {name: json.dumps(value.flatten().tolist()) for name, value in statistics.named_buffers()}
    save_file(state, path, metadata={"format": "pt", **metadata})


def _safetensors(model: nn.Module, path: Path, images_BCHW: Tensor) -> None:
    save_file({key: value.contiguous() for key, value in model.state_dict().items()}, path, metadata={"format": "pt"})


def _torch(model: nn.Module, path: Path, images_BCHW: Tensor) -> None:
    batch = torch.export.Dim("batch")
    program = torch.export.export(model, (images_BCHW,), dynamic_shapes=({0: batch},))
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    path.write_bytes(buffer.getvalue())


def _onnx(model: nn.Module, path: Path, images_BCHW: Tensor) -> None:
    if absent := [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]:
        raise UserError(f"ONNX export needs {' and '.join(absent)}; run `pip install 'certizoo[onnx]'`")
    program = torch.onnx.export(
        model,
        (images_BCHW,),
        dynamo=True,
        verbose=False,
        input_names=["images"],
        output_names=["logits"],
        dynamic_shapes=({0: torch.export.Dim("batch")},),
    )
    assert program is not None
    program.save(path, external_data=False)


FORMATS: dict[str, Callable[[nn.Module, Path, Tensor], None]] = {
    "timm": _timm,
    "safetensors": _safetensors,
    "torch": _torch,
    "onnx": _onnx,
}
