"""Models of other people's classes, and of timm and torchvision, at a few pixels."""

from collections.abc import Callable

import timm
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

SIZE = 8


class Block(nn.Module):
    """A block of a ResNet with a strided shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(6, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.norm2 = nn.Conv2d(8, 8, 3, 1, 1, groups=2), nn.GroupNorm(2, 8)
        self.shortcut = nn.Sequential(nn.AvgPool2d(2), nn.Conv2d(6, 8, 1))

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.norm1(self.conv1(x)), inplace=True)
        y = self.norm2(self.conv2(y))
        y += self.shortcut(x)
        return y.relu_()


class Net(nn.Module):
    """A conv net as people write them: normalisation by hand, in-place operations, shapes read from the tensor."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.5, 0.4, 0.3]).view(1, 3, 1, 1))
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1, padding_mode="reflect"), nn.Hardswish())
        self.block = Block()
        self.fc = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] != 3:
            raise ValueError("three channels")
        x = self.block(self.stem((x - self.mean) / 0.25))
        x = F.max_pool2d(x, 3, stride=2, padding=1)
        return self.fc(x.view(x.size(0), -1))


class Attention(nn.Module):
    """Softmax attention written by hand, one head after the other in the channels."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.q, self.kv, self.out = heads, nn.Linear(dim, dim), nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        b, n, d = x.shape
        q = self.q(x).view(b, n, self.heads, -1).transpose(1, 2) * (d // self.heads) ** -0.5
        k, v = (t.unflatten(-1, (-1, self.heads)).movedim(-1, 1) for t in self.kv(x).chunk(2, -1))
        weights = torch.softmax(q @ k.mT, dim=-1)
        return self.out((weights @ v).transpose(1, 2).reshape(b, n, d))


class Tokens(nn.Module):
    """A small transformer of own classes: class token, positions, LayerScale, attention by hand and torch's own."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 8, 4, 4)
        self.token, self.positions = nn.Parameter(torch.randn(1, 1, 8)), nn.Parameter(torch.randn(1, 5, 8))
        self.attention, self.mha = Attention(8, 2), nn.MultiheadAttention(8, 2, batch_first=True)
        self.norms = nn.ModuleList(nn.LayerNorm(8, eps=0.1) for _ in range(3))
        self.gamma = nn.Parameter(torch.rand(8))
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 8))
        self.inner = nn.Identity() if inner is None else inner
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.positions
        x = x + self.gamma * self.attention(self.norms[0](x))
        y = self.norms[1](x)
        x = x + self.mha(y, y, y, need_weights=False)[0]
        x = x + self.mlp(self.inner(self.norms[2](x)))
        return F.log_softmax(self.head(x[:, 0]), dim=-1)


def plain() -> nn.Module:
    """Return a conv net with batch normalisation, as most people's first one."""
    convs = [nn.Conv2d(3, 6, 3, 2, 1), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 8, 3, padding=1)]
    return nn.Sequential(*convs, nn.LeakyReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))


class MaxMin(nn.Module):
    """The two halves of the channels, sorted."""

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, 1)
        return torch.cat([torch.maximum(a, b), torch.minimum(a, b)], 1)


def sorted_net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 4, 4), MaxMin(), nn.Flatten(), nn.Linear(32, 4))


OWN: dict[str, Callable[[], nn.Module]] = {"plain": plain, "net": Net, "tokens": Tokens, "sorted": sorted_net}


def vit_of_torchvision() -> nn.Module:
    return torchvision.models.VisionTransformer(
        image_size=32, patch_size=8, num_layers=1, num_heads=2, hidden_dim=16, mlp_dim=32, num_classes=10
    )


def swin_of_torchvision() -> nn.Module:
    return torchvision.models.SwinTransformer([2, 2], 16, [2, 2], [2, 2], [4, 4], num_classes=10)


def swin_of_timm() -> nn.Module:
    sizes = {"img_size": 32, "patch_size": 2, "window_size": 4, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 2)}
    return timm.create_model("swin_tiny_patch4_window7_224", **sizes)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "torchvision resnet18": lambda: torchvision.models.resnet18(num_classes=10),
    "torchvision vit": vit_of_torchvision,
    "timm resnet10t": lambda: timm.create_model("resnet10t", num_classes=10),
    "timm vit_tiny": lambda: timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=1),
    "timm deit": lambda: timm.create_model("deit_tiny_distilled_patch16_224", img_size=32, patch_size=8, depth=1),
    "timm convnext": lambda: timm.create_model("convnext_atto", depths=(1, 1, 1, 1)),
    "timm mixer": lambda: timm.models.MlpMixer(img_size=32, patch_size=8, num_blocks=1, embed_dim=16),
    "timm swin": swin_of_timm,
    "torchvision swin": swin_of_torchvision,
    "timm mobilenet": lambda: timm.create_model("mobilenetv2_035"),
}


def settled(make: Callable[[], nn.Module], size: int = SIZE) -> tuple[nn.Module, Tensor, Tensor]:
    """Return a model with running statistics of some images, images, and the model's labels."""
    torch.manual_seed(0)
    model = make()
    with torch.no_grad():
        for _ in range(3):
            model(torch.rand(8, 3, size, size))
        x = torch.rand(3, 3, size, size)
        return model.eval(), x, model.eval()(x).argmax(-1)
