"""Common models: hand-written classes and those of libraries, for images of 32 x 32 pixels and 10 classes."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

SIZE, CLASSES = 32, 10
Make = Callable[[], nn.Module]


def own_cnn() -> nn.Module:
    """Return a conv net with batch normalisation and pooling."""
    layers: list[nn.Module] = []
    for width, out in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(width, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(2048, CLASSES))


class OwnResNet(nn.Module):
    """Three residual blocks with strides, as people write them for CIFAR-10."""

    class Block(nn.Module):
        def __init__(self, width: int, out: int) -> None:
            super().__init__()
            self.conv1, self.norm1 = nn.Conv2d(width, out, 3, 2, 1, bias=False), nn.BatchNorm2d(out)
            self.conv2, self.norm2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
            self.shortcut = nn.Sequential(nn.Conv2d(width, out, 1, 2, bias=False), nn.BatchNorm2d(out))

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
            return torch.relu(y + self.shortcut(x))

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.blocks = nn.Sequential(*(self.Block(width, 2 * width) for width in (16, 32, 64)))
        self.fc = nn.Linear(128, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        mean, std = 0.47, 0.25
        return self.fc(self.blocks(self.stem((x - mean) / std)).mean((2, 3)))


class OwnViT(nn.Module):
    """A ViT of torch's own layers."""

    def __init__(self, dim: int = 48, depth: int = 2, patch: int = 8) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, dim, patch, patch)
        self.token = nn.Parameter(0.02 * torch.randn(1, 1, dim))
        self.positions = nn.Parameter(0.02 * torch.randn(1, 1 + (SIZE // patch) ** 2, dim))
        options: dict[str, Any] = {"activation": "gelu", "batch_first": True, "norm_first": True, "dropout": 0.0}
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(dim, 3, 2 * dim, **options) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).flatten(2).mT
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))


def own_mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def of_timm(name: str, **options: Any) -> Make:
    def make() -> nn.Module:
        import timm

        return timm.create_model(name, num_classes=CLASSES, **options)

    return make


def of_torchvision(name: str, **options: Any) -> Make:
    def make() -> nn.Module:
        import torchvision

        made: nn.Module = getattr(torchvision.models, name)(num_classes=CLASSES, **options)
        return made

    return make


def small_convnext() -> nn.Module:
    from torchvision.models import convnext

    blocks = [convnext.CNBlockConfig(24, 48, 1), convnext.CNBlockConfig(48, None, 2)]
    return convnext.ConvNeXt(blocks, num_classes=CLASSES)


class HuggingFace(nn.Module):
    """A ViT of transformers, whose answer is an object with the logits."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import ViTConfig, ViTForImageClassification  # type: ignore[import-not-found,unused-ignore]

        sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 128}
        self.vit = ViTForImageClassification(ViTConfig(image_size=SIZE, patch_size=8, num_labels=CLASSES, **sizes))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.vit(x).logits
        return logits


def deel() -> nn.Module:
    from deel import torchlip as lip  # type: ignore[import-not-found,unused-ignore]

    convs = [lip.SpectralConv2d(3, 16, 3, padding=1), lip.GroupSort2(), lip.ScaledAvgPool2d(4)]
    dense = [lip.SpectralLinear(1024, 64), lip.GroupSort2(), lip.SpectralLinear(64, CLASSES)]
    made: nn.Module = lip.Sequential(*convs, nn.Flatten(), *dense)
    return made


def orthogonium() -> nn.Module:
    from orthogonium.layers import AdaptiveOrthoConv2d, MaxMin, OrthoLinear  # type: ignore[import-not-found,unused-ignore]

    options = {"kernel_size": 4, "stride": 2, "padding": 1, "padding_mode": "circular"}
    convs = [AdaptiveOrthoConv2d(3, 16, **options), MaxMin(), AdaptiveOrthoConv2d(16, 32, **options), MaxMin()]
    return nn.Sequential(*convs, nn.Flatten(), OrthoLinear(2048, 64), MaxMin(), OrthoLinear(64, CLASSES))


PATCHES = {"img_size": SIZE, "patch_size": 8}
VIT = {"image_size": SIZE, "patch_size": 8, "num_layers": 6, "num_heads": 3, "hidden_dim": 96, "mlp_dim": 384}
MODELS: dict[str, Make] = {
    "own MLP": own_mlp,
    "own CNN with BatchNorm and MaxPool": own_cnn,
    "own ResNet of 3 blocks": OwnResNet,
    "own ViT of `nn.TransformerEncoderLayer`": OwnViT,
    "deel-torchlip, 1-Lipschitz": deel,
    "orthogonium, 1-Lipschitz": orthogonium,
    "torchvision `resnet18`": of_torchvision("resnet18"),
    "torchvision `vgg11_bn`": of_torchvision("vgg11_bn"),
    "torchvision `mobilenet_v2`": of_torchvision("mobilenet_v2"),
    "torchvision `VisionTransformer`, 6 blocks": of_torchvision("VisionTransformer", **VIT),
    "torchvision `ConvNeXt`, 3 blocks": small_convnext,
    "timm `resnet10t`": of_timm("resnet10t"),
    "timm `resnetv2_18`": of_timm("resnetv2_18"),
    "timm `vit_tiny`, 12 blocks": of_timm("vit_tiny_patch16_224", **PATCHES),
    "timm `deit_tiny`, 12 blocks": of_timm("deit_tiny_patch16_224", **PATCHES),
    "timm `beit_base`, 2 blocks": of_timm("beit_base_patch16_224", depth=2, embed_dim=96, num_heads=3, **PATCHES),
    "timm `convnext_atto`": of_timm("convnext_atto"),
    "timm `mixer_s16`": of_timm("mixer_s16_224", img_size=SIZE),
    "transformers `ViTForImageClassification`, 4 blocks": HuggingFace,
    "timm `swin_tiny`": of_timm("swin_tiny_patch4_window7_224", img_size=SIZE, window_size=4),
    "timm `efficientnet_b0`": of_timm("efficientnet_b0"),
    "torchvision `densenet121`": of_torchvision("densenet121"),
}
TRAINED: dict[str, tuple[Make, float]] = {  # with the factor of the logits in the loss
    "own MLP, trained": (own_mlp, 1.0),
    "own CNN with BatchNorm and MaxPool, trained": (own_cnn, 1.0),
    "own ViT of `nn.TransformerEncoderLayer`, trained": (OwnViT, 1.0),
    "deel-torchlip, 1-Lipschitz, trained": (deel, 20.0),
}
