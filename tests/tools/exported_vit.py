"""A Vision Transformer as in the competition's benchmark, exported to ONNX in a folder with properties.

It has batch norms over channels, a class token, the mean of all tokens, and random weights and statistics.
"""

import io
import warnings
from pathlib import Path

import onnx
import torch
from torch import Tensor, nn

from benchmarks.vnncomp.vit import MEAN, STD


class _Norm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(dim)

    def forward(self, x_BND: Tensor) -> Tensor:
        y: Tensor = self.norm(x_BND.transpose(-1, -2))
        return y.transpose(-1, -2)


class _Attention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.dim, self.heads, self.scale = dim, heads, (dim // heads) ** -0.5
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x_BND: Tensor) -> Tensor:
        batch, dim = x_BND.shape[0], self.dim
        q, k, v = (
            part(x_BND).view(batch, -1, self.heads, dim // self.heads).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        p = (q @ k.transpose(-1, -2) * self.scale).softmax(-1)
        merged: Tensor = self.out((p @ v).transpose(1, 2).reshape(batch, -1, dim))
        return merged


class _Block(nn.Module):
    def __init__(self, dim: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.attn = nn.Sequential(_Norm(dim), _Attention(dim, heads))
        self.mlp = nn.Sequential(_Norm(dim), nn.Linear(dim, hidden), nn.ReLU(), nn.Linear(hidden, dim))

    def forward(self, x_BND: Tensor) -> Tensor:
        x_BND = self.attn(x_BND) + x_BND
        y: Tensor = self.mlp(x_BND) + x_BND
        return y


class PublishedViT(nn.Module):
    """Normalised images (B, C, side, side) -> logits (B, classes)."""

    def __init__(
        self, side: int = 8, patch: int = 4, dim: int = 8, depth: int = 2, heads: int = 2, classes: int = 4
    ) -> None:
        super().__init__()
        self.projection = nn.Conv2d(3, dim, patch, stride=patch)
        self.cls = nn.Parameter(torch.randn(dim))
        self.positions = nn.Parameter(torch.randn((side // patch) ** 2 + 1, dim))
        self.blocks = nn.Sequential(*(_Block(dim, heads, 2 * dim) for _ in range(depth)))
        self.norm, self.head = nn.BatchNorm1d(dim), nn.Linear(dim, classes)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        patches_BND = self.projection(x_BCHW).flatten(2).transpose(-1, -2)
        cls_B1D = torch.zeros(x_BCHW.shape[0], 1, len(self.cls)) + self.cls
        x_BND = torch.cat([cls_B1D, patches_BND], dim=1) + self.positions
        y: Tensor = self.head(self.norm(self.blocks(x_BND).mean(1)))
        return y


def published_vit(seed: int, **sizes: int) -> PublishedViT:
    """Return the model in eval mode, with batch norms as after a training."""
    torch.manual_seed(seed)
    model = PublishedViT(**sizes)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            assert module.running_mean is not None
            assert module.running_var is not None
            nn.init.normal_(module.running_mean)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
            nn.init.uniform_(module.weight, -1.5, 1.5)
            nn.init.normal_(module.bias)
    return model.eval()


def exported(model: PublishedViT, side: int = 8, opset: int = 9) -> bytes:
    """Return the ONNX file, for any batch size."""
    file = io.BytesIO()
    axes = {"input": {0: "batch_size"}, "output": {0: "batch_size"}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model,
            (torch.zeros(1, 3, side, side),),
            file,  # type: ignore[arg-type]
            dynamo=False,
            opset_version=opset,
            input_names=["input"],
            output_names=["output"],
            dynamic_axes=axes,
        )
    return file.getvalue()


def altered(content: bytes, change: object) -> bytes:
    """Return the file after `change(model)`."""
    model = onnx.ModelProto.FromString(content)
    assert callable(change)
    change(model)
    return model.SerializeToString()


def written(pixels_CHW: Tensor, eps: float, label: int, classes: int) -> str:
    """Return the property of an image in the benchmark's form: normalised, clipped to [0,1], in float32."""
    mean, std = (torch.tensor(statistic).view(-1, 1, 1) for statistic in (MEAN, STD))
    lower, upper = (((pixels_CHW + step).clamp(0, 1) - mean) / std for step in (-eps, eps))
    lines = [f"; Property with label: {label}.", ""]
    lines += [f"(declare-const X_{i} Real)" for i in range(pixels_CHW.numel())]
    lines += [f"(declare-const Y_{i} Real)" for i in range(classes)]
    for i, (low, high) in enumerate(zip(lower.flatten().tolist(), upper.flatten().tolist(), strict=True)):
        lines += [f"(assert (<= X_{i} {high}))", f"(assert (>= X_{i} {low}))", ""]
    rivals = [f"    (and (>= Y_{j} Y_{label}))" for j in range(classes) if j != label]
    return "\n".join([*lines, "; Output constraints:", "(assert (or", *rivals, "))", ""])


def benchmark(folder: Path, nets: dict[str, PublishedViT], properties: dict[str, list[str]]) -> Path:
    """Make a folder like the competition's, with these properties for each network."""
    (folder / "onnx").mkdir(parents=True)
    (folder / "vnnlib").mkdir()
    lines = []
    for name, net in nets.items():
        (folder / f"onnx/{name}.onnx").write_bytes(exported(net))
        for i, text in enumerate(properties[name]):
            (folder / f"vnnlib/{name}_{i}.vnnlib").write_text(text)
            lines.append(f"onnx/{name}.onnx,vnnlib/{name}_{i}.vnnlib,100")
    (folder / "instances.csv").write_text("\n".join(lines) + "\n")
    return folder
