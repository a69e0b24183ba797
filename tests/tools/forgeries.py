"""Forged models: finite float32 weights that compute a small number as the difference of two huge ones.

    c_0 = S x_0 + x_1,    c_1 = S x_0,    t = c_0 - c_1 = x_1                             S a power of two

Every clean image has x_0 = 0, so everything computed at the image itself is exact. A vector that is pushed or pulled
through the two maps loses x_1 in the rounding of S x_0. After t comes a softmax, or a unit GELU(G t - 60), which is
flat at the image; a small change of a single pixel then gives the image to class 0.

In exact arithmetic the function is the same for every S on images with x_0 = 0. The model with S = 0, which has nothing
to cancel, therefore tells the truth about the others.

A patch is read by its first two pixels, p0 and p1. Channels come in pairs: 2 c, and its negative 2 c + 1, which
centring norms leave unchanged.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import zoo
from certify.shared.certificate import Certificate, Certifier
from certizoo import UserError

MOST = 0.25  # this change of one pixel, or a smaller one, gives the image to class 0
GAIN = 2.0**13
BEYOND = (1.001, 8.0)  # multiples of the change that suffices, at which nothing may be certified
FLAT = 60.0  # distance of the clean image from the unit's kink
SCALES = tuple(2.0**k for k in (20, 40, 60, 80, 100))
OPTIONS: dict[str, Any] = {
    "img_size": 8,
    "in_chans": 1,
    "patch_size": 4,
    "num_classes": 2,
    "mean": (0.0,),
    "std": (1.0,),
    "embed_dim": 16,
    "depth": 1,
    "num_heads": 1,
    "mlp_ratio": 1.0,
    "norm": "centernorm",
    "global_pool": "avg",
}
WIDE: dict[str, Any] = {"embed_dim": 96}  # too wide for explicit Jacobians
SWIN: dict[str, Any] = {"depths": (1,), "num_heads": (1,), "window_size": 2}
Pixels = tuple[dict[int, float], ...]
Build = Callable[[float], Any]
SEPARATE: Pixels = ({0: 1.0}, {1: 1.0})
SUM: Pixels = ({0: 1.0, 1: 1.0}, {0: 1.0})  # pairs that are not orthogonal; x_0 is the second


def image() -> Tensor:
    """Return a random image (1, 1, 8, 8) whose patches begin with two zero pixels."""
    x = torch.rand(1, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    x[..., ::4, 0::4] = x[..., ::4, 1::4] = 0.0
    return x


def attacked(change: float) -> Tensor:
    """Return the image with p1 of its first patch set to `change`."""
    x = image()
    x[0, 0, 0, 1] = change
    return x


def change_needed(truth: Any) -> float:
    """Return the change of p1 beyond which a float64 model with S = 0 gives class 0, found from above."""
    low, high = 0.0, MOST
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if int(truth(attacked(middle).double()).argmax()) == 0 else (middle, high)
    return high


def at_sufficient_changes(make: Callable[[], Certifier], change: float) -> Certificate | None:
    """Certify the image at a change that suffices, and far beyond it; None if the model is refused."""
    images, labels = image().expand(len(BEYOND), -1, -1, -1), torch.ones(len(BEYOND), dtype=torch.long)
    try:
        analysis = make().analyse(images, labels)
    except UserError:
        return None
    return analysis.at(change * torch.tensor(BEYOND))


def blank(name: str = "dp_vit_ti", **options: Any) -> Any:
    """Return a model that always gives class 1: all weights are 0, except norm scales and one bias of the head."""
    known = {key: OPTIONS[key] for key in OPTIONS.keys() & zoo.model_options(name).keys()}
    model: Any = zoo.create_model(name, **(known | options)).eval().requires_grad_(False)
    for key, p in model.named_parameters():
        if "norm" not in key or key.endswith("bias"):
            p.zero_()
    if head(model).bias is not None:
        head(model).bias[1] = 1.0
    return model


def head(model: Any) -> nn.Linear:
    """Return the linear head of a ViT or a Swin Transformer."""
    linear: nn.Linear = getattr(model.head, "fc", model.head)
    return linear


def first_block(model: Any) -> Any:
    """Return the block after the patch embedding."""
    return model.layers[0].blocks[0] if hasattr(model, "layers") else model.blocks[0]


def wire(weight: Tensor, row: int, entries: dict[int, float]) -> None:
    """Make row 2 r of a weight (out, in) read these channel pairs, and row 2 r + 1 its negative, in place."""
    for column, value in entries.items():
        weight[2 * row, 2 * column] = value
        weight[2 * row + 1, 2 * column] = -value


def read(model: Any, *pixels: dict[int, float]) -> None:
    """Set channel pair c of every token to this sum of the pixels of its patch."""
    weight = model.patch_embed.proj.weight.flatten(1)
    for pair, entries in enumerate(pixels):
        for pixel, value in entries.items():
            weight[2 * pair, pixel], weight[2 * pair + 1, pixel] = value, -value


def unit(block: Any, entries: dict[int, float], out: int = 5) -> None:
    """Write GELU(sum - FLAT) of channel pairs to the pair `out`."""
    for pair, value in entries.items():
        block.mlp.fc1.weight[0, 2 * pair] = value
    block.mlp.fc1.bias[0] = -FLAT
    block.mlp.fc2.weight[2 * out, 0], block.mlp.fc2.weight[2 * out + 1, 0] = 1.0, -1.0


def decide(model: Any, entries: dict[int, float] | None = None) -> None:
    """Let these pairs, by default that of `unit`, speak for class 0."""
    for pair, value in ({5: 1.0} if entries is None else entries).items():
        head(model).weight[0, 2 * pair] = value


def attention(block: Any) -> Any:
    """Return the module with the projections."""
    return getattr(block.attn, "content", block.attn)


def values(block: Any) -> Tensor:
    """Return W_V of one head: (D, D)."""
    weight: Tensor = attention(block).qkv.weight
    return weight[-weight.shape[1] :]


def projection(block: Any) -> Tensor:
    """Return W_O: (D, D)."""
    weight: Tensor = attention(block).proj.weight
    return weight


# t between two maps of one module -------------------------------------------------------------------------------------


def mixing(s: float, gain: float = 1.0, **own: Any) -> Any:
    """Compute t in CoViT's token mixing and its projection."""
    model = blank("covit_s1", **({"attention": {"name": "conv", "kernels": (3,)}, "fc_norm": True} | own))
    block = model.blocks[0]
    read(model, *SEPARATE)
    taps = block.attn.convs[0].weight[..., 1]
    wire(taps, 0, {0: s, 1: 1.0})
    wire(taps, 1, {0: s})
    wire(projection(block), 4, {0: gain, 1: -gain})
    unit(block, {4: GAIN / gain})
    decide(model)
    return model


def value_and_projection(
    s: float, gain: float = 1.0, pixels: Pixels = SEPARATE, name: str = "dp_vit_ti", **own: Any
) -> Any:
    """Compute t in W_V and W_O of dot-product attention with uniform weights."""
    model = blank(name, **own)
    block = first_block(model)
    read(model, *pixels)
    huge = int(pixels is SUM)
    wire(values(block), 0, {huge: s, 1 - huge: 1.0})
    wire(values(block), 1, {huge: s})
    wire(projection(block), 4, {0: gain, 1: -gain})
    unit(block, {4: 4 * GAIN / gain})
    decide(model)
    return model


def scale_of_norm(s: float) -> Any:
    """Scale x_0 by S in the norm before the attention; W_V makes c_0 and c_1 of it."""
    model = blank()
    block = model.blocks[0]
    read(model, {0: 1.0}, {1: 1.0})
    block.norm1.weight[:2] = s
    wire(values(block), 0, {0: 1.0, 1: 1.0})
    wire(values(block), 1, {0: 1.0})
    wire(projection(block), 4, {0: 1.0, 1: -1.0})
    unit(block, {4: 4 * GAIN})
    decide(model)
    return model


# t between two modules ------------------------------------------------------------------------------------------------


def patches_and_attention(s: float, **own: Any) -> Any:
    """Compute t in the patch embedding and, after a norm, W_V."""
    model = blank(**own)
    block = model.blocks[0]
    read(model, {0: s, 1: 1.0}, {0: s})
    wire(values(block), 0, {0: 1.0, 1: -1.0})
    wire(projection(block), 4, {0: 1.0})
    unit(block, {4: 4 * GAIN})
    decide(model)
    return model


def patches_and_mlp(s: float, **own: Any) -> Any:
    """Compute t in the patch embedding and, after two sums and a norm, the hidden layer."""
    model = blank(**own)
    read(model, {0: s, 1: 1.0}, {0: s})
    unit(model.blocks[0], {0: GAIN, 1: -GAIN})
    decide(model)
    return model


def patches_and_scores(s: float) -> Any:
    """Compute t in the patch embedding and W_Q.

    The first token, whose value speaks for class 0, gets all attention instead of none.
    """
    model = blank()
    block = model.blocks[0]
    read(model, {0: s, 1: 1.0}, {0: s})
    model.pos_embed[0, 0, 4:6] = torch.tensor([1.0, -1.0])
    query_key, width = block.attn.qkv.weight, block.attn.qkv.in_features
    query_key[0, 0], query_key[0, 2] = 4 * GAIN, -4 * GAIN
    query_key[width, 4] = 1.0
    block.attn.qkv.bias[1] = 1.0  # a second entry of queries and keys, since the first holds S x_0
    query_key[width + 1, 4] = -4 * FLAT
    wire(values(block), 0, {2: 1.0})
    wire(projection(block), 5, {0: 64.0})
    decide(model, {5: 1.0})
    model.head.bias[1] = 17.5
    return model


def projection_and_mlp(s: float, **own: Any) -> Any:
    """Compute t in W_O of the attention and, after a norm, the hidden layer."""
    model = blank(**own)
    block = model.blocks[0]
    read(model, {0: 1.0}, {1: 1.0})
    wire(values(block), 0, {0: 1.0})
    wire(values(block), 1, {1: 1.0})
    wire(projection(block), 3, {0: s, 1: 1.0})
    wire(projection(block), 4, {0: s})
    unit(block, {3: 4 * GAIN, 4: -4 * GAIN})
    decide(model)
    return model


def mlp_and_mlp(s: float, **own: Any) -> Any:
    """Compute t in the outer layer of one block's MLP and the hidden layer of the next."""
    model = blank(**({"depth": 2} | own))
    first, second = model.blocks
    read(model, {0: 1.0}, {1: 1.0})
    first.mlp.fc1.weight[0, 0] = first.mlp.fc1.weight[1, 2] = 1.0
    for row, value in ((6, 1.0), (7, -1.0)):
        first.mlp.fc2.weight[row, 0] = value * s
        first.mlp.fc2.weight[row, 1] = value
        first.mlp.fc2.weight[row + 2, 0] = value * s
    unit(second, {3: 2 * GAIN, 4: -2 * GAIN})
    decide(model)
    return model


def mlp_and_attention(s: float) -> Any:
    """Compute t in the outer layer of one block's MLP and W_V of the next."""
    model = blank(depth=2)
    first, second = model.blocks
    read(model, {0: 1.0}, {1: 1.0})
    first.mlp.fc1.weight[0, 0] = first.mlp.fc1.weight[1, 2] = 1.0
    for row, value in ((6, 1.0), (7, -1.0)):
        first.mlp.fc2.weight[row, 0] = value * s
        first.mlp.fc2.weight[row, 1] = value
        first.mlp.fc2.weight[row + 2, 0] = value * s
    wire(values(second), 0, {3: 1.0, 4: -1.0})
    wire(projection(second), 2, {0: 1.0})
    unit(second, {2: 8 * GAIN})
    decide(model)
    return model


def stem_and_attention(s: float) -> Any:
    """Compute t in the last convolution of a stem and, after a norm, W_V."""
    model = blank(stem=((4, 4, 4, 0),))
    block = model.blocks[0]
    first, _, last = model.patch_embed.convs
    first.weight[0, 0, 0, 0] = first.weight[1, 0, 0, 1] = 1.0
    for row, value in ((0, 1.0), (1, -1.0)):
        last.weight[row, 0, 0, 0], last.weight[row, 1, 0, 0] = value * s, value
        last.weight[row + 2, 0, 0, 0] = value * s
    wire(values(block), 0, {0: 1.0, 1: -1.0})
    wire(projection(block), 4, {0: 1.0})
    unit(block, {4: 8 * GAIN})
    decide(model)
    return model


def convolutions(s: float) -> Any:
    """Compute t in two convolutions of a network, where ReLU is linear because nothing is negative."""
    layers = ((4, 4, 4, 0), (4, 1, 1, 0), (4, 1, 1, 0))
    own: dict[str, Any] = {"layers": layers, "hidden": (4,), "theta": None}
    model = blank("conv_4c3f", **own)
    convs = [module for module in model.convs if isinstance(module, nn.Conv2d)]
    convs[0].weight[0, 0, 0, 0] = convs[0].weight[1, 0, 0, 1] = 1.0
    convs[0].weight[2, 0, 3, 3] = 1.0  # the evidence for class 1
    convs[1].weight[0, 0], convs[1].weight[0, 1], convs[1].weight[1, 0], convs[1].weight[2, 2] = s, 1.0, s, 1.0
    convs[2].weight[0, 0], convs[2].weight[0, 1], convs[2].weight[1, 2] = GAIN, -GAIN, 1.0
    hidden = model.fcs[1]  # channels, then pixels
    hidden.weight[0, 0], hidden.weight[0, 4] = 1.0, -FLAT
    hidden.weight[1, 4] = 1.0
    model.head.weight[0, 0] = model.head.weight[1, 1] = 1.0
    return model


def pool_and_head(s: float) -> Any:
    """Compute t in W_O and, after pooling, the head."""
    model = blank()
    block = model.blocks[0]
    read(model, {0: 1.0}, {1: 1.0})
    wire(values(block), 0, {0: 1.0})
    wire(values(block), 1, {1: 1.0})
    wire(projection(block), 3, {0: s, 1: 1.0})
    wire(projection(block), 4, {0: s})
    decide(model, {3: GAIN, 4: -GAIN})
    return model


# gradients that cancel ------------------------------------------------------------------------------------------------


def gradient(s: float, order: tuple[int, int, int] = (0, 1, 2), hidden: bool = False) -> Any:
    """Feed p1 to three pairs a, b, c; the attention adds S a - S c = 0 to b, which class 0 reads.

    The forward pass is exact. The gradient of p1 is the sum of S, 1 and -S, in the order of the pairs.
    """
    model = blank()
    block = model.blocks[0]
    a, b, c = order
    read(model, *({1: 1.0} for _ in order))
    wire(values(block), 0, {a: s, c: -s})
    wire(projection(block), b, {0: 1.0})
    if hidden:
        unit(block, {b: GAIN})
    decide(model, None if hidden else {b: GAIN})
    return model


FAMILIES: dict[str, Build] = {
    "mixing": mixing,
    "mixing_gain": lambda s: mixing(s, GAIN),
    "mixing_wide": lambda s: mixing(s, GAIN, **WIDE),
    "value_projection": value_and_projection,
    "value_projection_gain": lambda s: value_and_projection(s, GAIN),
    "value_projection_sum": lambda s: value_and_projection(s, GAIN, SUM),
    "value_projection_wide": lambda s: value_and_projection(s, GAIN, **WIDE),
    "value_projection_layernorm": lambda s: value_and_projection(s, norm={"name": "layernorm", "eps": 1.0}),
    "value_projection_gpsa": lambda s: value_and_projection(s, gpsa_layers=1),
    "value_projection_swin": lambda s: value_and_projection(s, name="dp_swin_t", **SWIN),
    "value_projection_cls": lambda s: value_and_projection(s, global_pool="cls"),
    "scale_of_norm": scale_of_norm,
    "patches_attention": patches_and_attention,
    "patches_mlp": patches_and_mlp,
    "patches_scores": patches_and_scores,
    "projection_mlp": projection_and_mlp,
    "mlp_mlp": mlp_and_mlp,
    "mlp_attention": mlp_and_attention,
    "stem_attention": stem_and_attention,
    "convolutions": convolutions,
    "pool_head": pool_and_head,
    "gradient": gradient,
    "gradient_unit": lambda s: gradient(s, hidden=True),
    "gradient_021": lambda s: gradient(s, (0, 2, 1)),
    "gradient_102": lambda s: gradient(s, (1, 0, 2)),
}
