"""Slow definitions of every model, written from the papers: pure functions of (options, state dict, images), float64.

They use no module of the zoo: loops over images, heads, tokens and windows replace the fast code's kernels. Options are
those of `zoo.model_options`; the state dict has its parametrisations folded.

Letters: N tokens, D width, H heads, O = D / H, M = D O matrices; one image at a time.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Options = Mapping[str, Any]
State = Mapping[str, Tensor]


def logits(options: Options, state: State, images_BCHW: Tensor) -> Tensor:
    """Map images (B, C, H, W) in [0, 1] to logits (B, num_classes)."""
    model = BACKBONES[options["backbone"]]
    state = {key: value.double() if value.is_floating_point() else value for key, value in state.items()}
    return torch.stack([model(options, state, _normalised(state, image)) for image in images_BCHW.double()])


def _normalised(state: State, image_CHW: Tensor) -> Tensor:
    """(x - mean) / std, channel by channel; one number may serve all channels."""
    mean, std = (state[f"normalize.{name}"].flatten().expand(len(image_CHW)) for name in ("mean", "std"))
    return torch.stack([(channel - mean[c]) / std[c] for c, channel in enumerate(image_CHW)])


def _below(state: State, prefix: str) -> State:
    return {key.removeprefix(prefix + "."): value for key, value in state.items() if key.startswith(prefix + ".")}


def _choice(option: Any) -> dict[str, Any]:
    """Expand 'dp' or {name: dp, ...} to the mapping."""
    return {"name": option} if isinstance(option, str) else dict(option)


# token-wise layers ---------------------------------------------------------------------------------------------------


def linear(s: State, x: Tensor) -> Tensor:
    """Compute x W + b, with W stored transposed."""
    y = x @ s["weight"].T
    return y + s["bias"] if "bias" in s else y


def softmax(row: Tensor) -> Tensor:
    e = torch.exp(row - row.max())
    return e / e.sum()


def gelu(x: Tensor) -> Tensor:
    """Compute x Phi(x)."""
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def layernorm(own: Options, s: State, x_ND: Tensor) -> Tensor:
    eps = own.get("eps", 1e-6)
    rows = [(x - x.mean()) / torch.sqrt(((x - x.mean()) ** 2).mean() + eps) for x in x_ND]
    if not own.get("elementwise_affine", True):
        return torch.stack(rows)
    return torch.stack(rows) * s["weight"] + s["bias"]


def layerproject(own: Options, s: State, x_ND: Tensor) -> Tensor:
    """LoFAST, eq. 29: x R / max(||x||, R)."""
    radius = own.get("radius", math.sqrt(x_ND.shape[1]))
    return torch.stack([x * radius / max(float(x.norm()), radius) for x in x_ND])


def smoothproject(own: Options, s: State, x_ND: Tensor) -> Tensor:
    """Compute x / sqrt(1 + ||x||^2 / R^2)."""
    radius = own.get("radius", math.sqrt(x_ND.shape[1]))
    return torch.stack([x / math.sqrt(1 + float(x @ x) / radius**2) for x in x_ND])


def centernorm(own: Options, s: State, x_ND: Tensor) -> Tensor:
    """LipsFormer: gamma D / (D - 1) (x - mean x) + beta."""
    d = x_ND.shape[1]
    return torch.stack([s["weight"] * d / (d - 1) * (x - x.sum() / d) + s["bias"] for x in x_ND])


NORMS = {
    "layernorm": layernorm,
    "layerproject": layerproject,
    "smoothproject": smoothproject,
    "centernorm": centernorm,
}


def norm(option: Any, s: State, x_ND: Tensor) -> Tensor:
    own = _choice(option)
    return NORMS[own["name"]](own, s, x_ND)


def _gelu_mlp(s: State, x_ND: Tensor) -> Tensor:
    return linear(_below(s, "fc2"), gelu(linear(_below(s, "fc1"), x_ND)))


def _sll(activation: Callable[[Tensor], Tensor]) -> Callable[[State, Tensor], Tensor]:
    """Compute x - 2 W T^-1 sigma(W^T x + b), T_ii = sum_j |W^T W|_ij q_j / q_i, q = exp(log_q)."""

    def layer(s: State, x_ND: Tensor) -> Tensor:
        w, q = s["weight"], s["log_q"].exp()
        gram = w.T @ w
        t = torch.stack([(gram[i].abs() * q / q[i]).sum() for i in range(len(q))])
        return torch.stack([x - 2 * w @ (activation(w.T @ x + s["bias"]) / t) for x in x_ND])

    return layer


def _averaged(activation: Callable[[Tensor], Tensor]) -> Callable[[State, Tensor], Tensor]:
    """(x + W_2 sigma(W_1 x + b_1) + b_2) / 2."""
    return lambda s, x_ND: (x_ND + linear(_below(s, "fc2"), activation(linear(_below(s, "fc1"), x_ND)))) / 2


def relu(x: Tensor) -> Tensor:
    return torch.where(x > 0, x, torch.zeros_like(x))


MLPS = {"gelu": _gelu_mlp, "sll_relu": _sll(relu), "sll_tanh": _sll(torch.tanh)}
for _kind in ("aol", "orthogonal", "capped"):
    MLPS |= {f"{_kind}_relu": _averaged(relu), f"{_kind}_tanh": _averaged(torch.tanh)}


# attention: (own options, weights, tokens, heads) -> scores (H, N, N), values (H, N, O) -------------------------------


def _projections(s: State, x_ND: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return X W_Q, X W_K, X W_V. The rows of the stored matrix are q, k, v, each head after head."""
    size = x_ND.shape[1] // heads

    def one(part: int) -> Tensor:
        blocks = []
        for head in range(heads):
            rows = slice((part * heads + head) * size, (part * heads + head + 1) * size)
            own = {key: value[rows] for key, value in _below(s, "qkv").items()}
            blocks.append(linear(own, x_ND))
        return torch.stack(blocks)

    return one(0), one(1), one(2)


def dp(own: Options, s: State, x_ND: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Q K^T / sqrt(D / H)."""
    q, k, v = _projections(s, x_ND, heads)
    scale = own.get("scale") or 1 / math.sqrt(x_ND.shape[1] / heads)
    return torch.stack([scale * q[h] @ k[h].T for h in range(heads)]), v


def l2(own: Options, s: State, x_ND: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Kim et al. 2021: -||x_i W_Q - x_j W_K||^2 / sqrt(D / H), values X A W_V with A = W_Q W_Q^T / sqrt(D / H)."""
    size = x_ND.shape[1] // heads
    key = "q.weight" if own.get("tied", True) else "k.weight"
    scores, values = [], []
    for head in range(heads):
        rows = slice(head * size, (head + 1) * size)
        w_q, w_k, w_v = s["q.weight"][rows].T, s[key][rows].T, s["v.weight"][rows].T  # (D, O)
        distance = [[((x @ w_q - z @ w_k) ** 2).sum() for z in x_ND] for x in x_ND]
        scores.append(-torch.stack([torch.stack(row) for row in distance]) / math.sqrt(size))
        values.append(x_ND @ (w_q @ w_q.T / math.sqrt(size)) @ w_v)
    return torch.stack(scores), torch.stack(values)


def scsa(own: Options, s: State, x_ND: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """LipsFormer: tau q^ k^T and nu v^, rows u^ = u / sqrt(||u||^2 + e)."""
    eps = own.get("eps", 0.1)
    q, k, v = (t / torch.sqrt((t**2).sum(-1, keepdim=True) + eps) for t in _projections(s, x_ND, heads))
    return torch.stack([own.get("tau", 10.0) * q[h] @ k[h].T for h in range(heads)]), own.get("nu", 1.0) * v


def ln(own: Options, s: State, x_ND: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Dasoulas et al. 2021 (SpecFormer, appendix D): Q K^T / max(u v, u w, v w) per head."""
    q, k, v = _projections(s, x_ND, heads)
    scores = []
    for head in range(heads):
        u = math.sqrt(float((q[head] ** 2).sum()))
        v_max, w_max = (max(float(row.norm()) for row in t[head]) for t in (k, v))
        scores.append(q[head] @ k[head].T / max(u * v_max, u * w_max, v_max * w_max))
    return torch.stack(scores), v


Core = Callable[[Options, State, Tensor, int], tuple[Tensor, Tensor]]
CORES: dict[str, Core] = {"dp": dp, "l2": l2, "scsa": scsa, "ln": ln}


def attend(p_HNN: Tensor, v_HNO: Tensor, s: State) -> Tensor:
    """Concatenate the heads P V and project them."""
    return linear(_below(s, "proj"), torch.cat([p @ v for p, v in zip(p_HNN, v_HNO, strict=True)], dim=1))


def _softmax_rows(scores_HNN: Tensor) -> Tensor:
    return torch.stack([torch.stack([softmax(row) for row in head]) for head in scores_HNN])


def attention(option: Any, s: State, x_ND: Tensor, heads: int) -> Tensor:
    own = _choice(option)
    if own["name"] == "conv":
        return conv_mixing(own, s, x_ND, heads)
    scores, values = CORES[own["name"]](own, s, x_ND, heads)
    return attend(_softmax_rows(scores), values, s)


def conv_mixing(own: Options, s: State, x_ND: Tensor, heads: int) -> Tensor:
    """CoViT: each group of channels has its own 1-D convolution along the tokens, with zero padding."""
    groups = heads if isinstance(own.get("kernels", 3), int) else len(own["kernels"])
    n, width = len(x_ND), x_ND.shape[1] // groups
    parts = []
    for group in range(groups):
        kernel, bias = s[f"convs.{group}.weight"], s[f"convs.{group}.bias"]  # (out, in, K)
        x, half = x_ND[:, group * width : (group + 1) * width], kernel.shape[2] // 2
        y = bias.repeat(n, 1)
        for i in range(n):
            for t in range(kernel.shape[2]):
                if 0 <= i + t - half < n:
                    y[i] += kernel[:, :, t] @ x[i + t - half]
        parts.append(y)
    return linear(_below(s, "proj"), torch.cat(parts, dim=1))


def gpsa(option: Any, s: State, x_ND: Tensor, heads: int) -> Tensor:
    """ConViT, eq. 6-7: P = (1 - g) softmax(content) + g softmax(w . r), r = (dx, dy, dx^2 + dy^2) from i to j."""
    own = _choice(option)
    scores, values = CORES[own["name"]](own, _below(s, "content"), x_ND, heads)
    side = math.isqrt(len(x_ND))
    places = [(y, x) for y in range(side) for x in range(side)]
    offsets = [[(xj - xi, yj - yi, (xj - xi) ** 2 + (yj - yi) ** 2) for yj, xj in places] for yi, xi in places]
    positional = linear(_below(s, "pos_proj"), torch.tensor(offsets, dtype=torch.float64)).permute(2, 0, 1)
    gate = 1 / (1 + torch.exp(-s["gating_param"]))[:, None, None]
    p = (1 - gate) * _softmax_rows(scores) + gate * _softmax_rows(positional)
    return attend(p, values, _below(s, "content"))


# the Vision Transformer ----------------------------------------------------------------------------------------------


def vit(options: Options, state: State, image_CHW: Tensor) -> Tensor:
    """Map one image to logits. ConViT's class token joins after its `gpsa_layers` blocks."""
    if "vocabulary" in options:
        return _vit_of_tokens(options, state, torch.stack([row.flatten() for row in image_CHW.unbind(1)]), 0)
    if options["stem"] is None:
        x = patches(_below(state, "patch_embed.proj"), image_CHW, options["patch_size"])
    else:
        x = stem(_below(state, "patch_embed.convs"), image_CHW, options["stem"], options["patch_size"])
    return _vit_of_tokens(options, state, x, options["gpsa_layers"])


def _vit_of_tokens(options: Options, state: State, x: Tensor, late: int) -> Tensor:
    """Add positions and class token, and run the blocks: tokens of one image to logits."""
    has_cls = options["global_pool"] == "cls"
    if has_cls and not late:
        x = torch.cat([state["cls_token"][0], x])
    x = x + state["pos_embed"][0][: len(x)]
    for index in range(options["depth"]):
        if has_cls and late and index == late:
            x = torch.cat([state["cls_token"][0], x])
        x = BLOCKS[options["block"]](options, _below(state, f"blocks.{index}"), x, index < late)
    if options["fc_norm"]:
        pooled = norm(options["norm"], _below(state, "fc_norm"), _pool(options, x)[None])[0]
    else:
        pooled = _pool(options, norm(options["norm"], _below(state, "norm"), x))
    return linear(_below(state, "head"), pooled)


def patches(s: State, image_CHW: Tensor, size: int) -> Tensor:
    """Multiply each patch (C, size, size), row by row, by the embedding matrix: (N, D)."""
    _, height, width = image_CHW.shape
    cut = [
        image_CHW[:, y : y + size, x : x + size].flatten()
        for y in range(0, height, size)
        for x in range(0, width, size)
    ]
    matrix = {key: value.flatten(1) if key == "weight" else value for key, value in s.items()}
    return linear(matrix, torch.stack(cut))


def stem(s: State, image_CHW: Tensor, layers: Sequence[Any], patch_size: int) -> Tensor:
    """Convolve with zero padding, apply GELU, and repeat: (N, D)."""
    if all(isinstance(layer, int) for layer in layers):
        windows = [(3, 2, 1)] * (len(layers) + 1)
    else:
        strides = math.prod(stride for _, _, stride, _ in layers)
        last = patch_size // strides
        windows = [(kernel, stride, padding) for _, kernel, stride, padding in layers] + [(last, last, 0)]
    x_CHW = image_CHW
    for index, (kernel, stride, padding) in enumerate(windows):
        if index:
            x_CHW = gelu(x_CHW)
        own = _below(s, f"{2 * index}")
        matrix = {key: value.flatten(1) if key == "weight" else value for key, value in own.items()}
        _, height, width = x_CHW.shape
        height, width = height + 2 * padding, width + 2 * padding
        padded = torch.zeros(len(x_CHW), height, width, dtype=x_CHW.dtype)
        padded[:, padding : height - padding, padding : width - padding] = x_CHW
        rows = [
            torch.stack(
                [
                    linear(matrix, padded[:, y : y + kernel, x : x + kernel].flatten())
                    for x in range(0, width - kernel + 1, stride)
                ]
            )
            for y in range(0, height - kernel + 1, stride)
        ]
        x_CHW = torch.stack(rows).movedim(-1, 0)
    return x_CHW.flatten(1).T


def _pool(options: Options, x_ND: Tensor) -> Tensor:
    return x_ND[0] if options["global_pool"] == "cls" else x_ND.sum(0) / len(x_ND)


def _parts(options: Options, s: State, positional: bool) -> tuple[Callable[[Tensor], Tensor], ...]:
    """Return attention, MLP, norm1 and norm2 of one block."""
    mixing = gpsa if positional else attention
    attn_norm = options["attn_norm"] or options["norm"]
    return (
        lambda x: mixing(options["attention"], _below(s, "attn"), x, options["num_heads"]),
        lambda x: MLPS[options["mlp"]](_below(s, "mlp"), x),
        lambda x: norm(attn_norm, _below(s, "norm1"), x),
        lambda x: norm(options["norm"], _below(s, "norm2"), x),
    )


def _weight(options: Options, s: State, key: str) -> Tensor | float:
    """Return LipsFormer's alpha of a branch, kept in [0, bound]; 1 without one."""
    if options["residual"] is None:
        return 1.0
    return s[f"{key}.alpha_D"].clamp(0, _choice(options["residual"]).get("bound", 1.0))


def prenorm(options: Options, s: State, x_ND: Tensor, positional: bool) -> Tensor:
    """Compute x + a attn(norm(x)), x + a mlp(norm(x))."""
    attn, mlp, norm1, norm2 = _parts(options, s, positional)
    x_ND = x_ND + _weight(options, s, "scale1") * attn(norm1(x_ND))
    return x_ND + _weight(options, s, "scale2") * mlp(norm2(x_ND))


def postnorm(options: Options, s: State, x_ND: Tensor, positional: bool) -> Tensor:
    """LipsFormer: norm(x + a attn(x)), norm(x + a mlp(x))."""
    attn, mlp, norm1, norm2 = _parts(options, s, positional)
    x_ND = norm1(x_ND + _weight(options, s, "scale1") * attn(x_ND))
    return norm2(x_ND + _weight(options, s, "scale2") * mlp(x_ND))


def normfirst(options: Options, s: State, x_ND: Tensor, positional: bool) -> Tensor:
    """LoFAST: norm, x + attn(x), norm, mlp (with its own residual)."""
    attn, mlp, norm1, norm2 = _parts(options, s, positional)
    x_ND = norm1(x_ND)
    return mlp(norm2(x_ND + attn(x_ND)))


BLOCKS = {"prenorm": prenorm, "postnorm": postnorm, "normfirst": normfirst}


# Swin ----------------------------------------------------------------------------------------------------------------


def swin(options: Options, state: State, image_CHW: Tensor) -> Tensor:
    """Map one image to logits: stages of blocks with plain and shifted windows in turn, and patch merging between."""
    side = image_CHW.shape[1] // options["patch_size"]
    x = patches(_below(state, "patch_embed.proj"), image_CHW, options["patch_size"])
    x = norm(options["norm"], _below(state, "patch_embed.norm"), x)
    for stage, depth in enumerate(options["depths"]):
        s = _below(state, f"layers.{stage}")
        if stage:
            x, side = _merged(options, _below(s, "downsample"), x, side), side // 2
        for index in range(depth):
            x = _swin_block(options, _below(s, f"blocks.{index}"), x, side, options["num_heads"][stage], index % 2 == 1)
    x = norm(options["norm"], _below(state, "norm"), x)
    return linear(_below(state, "head.fc"), x.sum(0) / len(x))


def _merged(options: Options, s: State, x_ND: Tensor, side: int) -> Tensor:
    """Concatenate 2 x 2 neighbours column by column, normalise and project."""
    merged = []
    for y in range(0, side, 2):
        for x in range(0, side, 2):
            four = [(y, x), (y + 1, x), (y, x + 1), (y + 1, x + 1)]
            merged.append(torch.cat([x_ND[i * side + j] for i, j in four]))
    return linear(_below(s, "reduction"), norm(options["norm"], _below(s, "norm"), torch.stack(merged)))


def _swin_block(options: Options, s: State, x_ND: Tensor, side: int, heads: int, shifted: bool) -> Tensor:
    window = min(options["window_size"], side)
    shift = window // 2 if shifted and window < side else 0
    normed = norm(options["norm"], _below(s, "norm1"), x_ND)
    mixed = torch.zeros_like(x_ND)
    for tokens in _windows(side, window, shift):
        places = [y * side + x for y, x in tokens]
        mixed[places] = _window_attention(
            options, _below(s, "attn"), normed[places], heads, tokens, side, window, shift
        )
    x_ND = x_ND + mixed
    return x_ND + MLPS[options["mlp"]](_below(s, "mlp"), norm(options["norm"], _below(s, "norm2"), x_ND))


def _windows(side: int, window: int, shift: int) -> list[list[tuple[int, int]]]:
    """Return the (y, x) of the tokens of each window, cut from the grid rolled by `shift`."""
    rolled = [[((a + shift) % side, (b + shift) % side) for b in range(side)] for a in range(side)]
    return [
        [rolled[a][b] for a in range(top, top + window) for b in range(left, left + window)]
        for top in range(0, side, window)
        for left in range(0, side, window)
    ]


def _window_attention(
    options: Options,
    s: State,
    x_ND: Tensor,
    heads: int,
    tokens: list[tuple[int, int]],
    side: int,
    window: int,
    shift: int,
) -> Tensor:
    """softmax(scores + T_offset), masked between tokens that are neighbours only by the roll."""
    own = _choice(options["attention"])
    scores, values = CORES[own["name"]](own, _below(s, "content"), x_ND, heads)
    table = s["relative_position_bias_table"]
    for i, (yi, xi) in enumerate(tokens):
        for j, (yj, xj) in enumerate(tokens):
            dy, dx = ((yi - shift) % side) - ((yj - shift) % side), ((xi - shift) % side) - ((xj - shift) % side)
            scores[:, i, j] += table[(dy + window - 1) * (2 * window - 1) + dx + window - 1]
            if (yi < shift) != (yj < shift) or (xi < shift) != (xj < shift):
                scores[:, i, j] = -math.inf
    return attend(_softmax_rows(scores), values, _below(s, "content"))


# conv nets -----------------------------------------------------------------------------------------------------------


def convnet(options: Options, state: State, image_CHW: Tensor) -> Tensor:
    """CertViT: convolutions, then linear layers, min(max(x, 0), theta) after all but the last; no biases."""
    x = image_CHW
    for index, (_, size, stride, padding) in enumerate(options["layers"]):
        x = _thresholded(
            state, f"convs.{2 * index + 1}", convolution(state[f"convs.{2 * index}.weight"], x, size, stride, padding)
        )
    x = x.flatten()
    for index in range(len(options["hidden"])):
        x = _thresholded(state, f"fcs.{2 * index + 2}", state[f"fcs.{2 * index + 1}.weight"] @ x)
    return state["head.weight"] @ x


def convolution(kernel_OCkk: Tensor, x_CHW: Tensor, size: int, stride: int, padding: int) -> Tensor:
    """Compute one matrix product for every place of the kernel."""
    channels, height, width = x_CHW.shape
    padded = torch.zeros(channels, height + 2 * padding, width + 2 * padding, dtype=x_CHW.dtype)
    padded[:, padding : padding + height, padding : padding + width] = x_CHW
    rows, columns = ((n + 2 * padding - size) // stride + 1 for n in (height, width))
    cut = [
        padded[:, y * stride : y * stride + size, x * stride : x * stride + size].flatten()
        for y in range(rows)
        for x in range(columns)
    ]
    return (kernel_OCkk.flatten(1) @ torch.stack(cut, dim=1)).unflatten(1, (rows, columns))


def _thresholded(state: State, key: str, x: Tensor) -> Tensor:
    y = relu(x)
    theta = state.get(f"{key}.theta")
    return y if theta is None else torch.where(y < theta, y, theta)


BACKBONES: dict[str, Callable[[Options, State, Tensor], Tensor]] = {
    "vit": vit,
    "text": vit,
    "swin": swin,
    "convnet": convnet,
}
