"""Common code of all attention of the form softmax(score) V: one fused kernel, and the methods that a variant defines.

    F(X) = merge( softmax(s q k^T + bias) v )        per head, on `F.scaled_dot_product_attention`

A variant defines q, k and v (`heads`) so that its score is their dot product, up to a constant per row, which the
softmax drops. Windows and gated positions wrap a variant (window.py, gpsa.py) through the same methods. In code W is
stored transposed, as in torch: head l of W_Q is the block of OUTPUT rows `weight[l dh : (l+1) dh]`.

Letters: B images, N tokens, D width, H heads, O = D / H (dh), E width of q and k per head.
"""

import copy
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from certizoo import UserError
from zoo.layers.cap import cap_
from zoo.spectral import start_vectors


class SoftmaxAttention(nn.Module):
    """Abstract: a variant defines `heads` and `merge`, and may set `scale`. x (B, N, D) -> (B, N, D)."""

    num_heads: int
    scale = 1.0

    def heads(self, x_BND: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q (B, H, N, E), k (B, H, N, E), v (B, H, N, O)."""
        raise NotImplementedError

    def merge(self, y_BHNO: Tensor) -> Tensor:
        """Concatenate and project the heads: (B, H, N, O) -> (B, N, D)."""
        raise NotImplementedError

    def forward(self, x_BND: Tensor, bias: Tensor | None = None, first: int | None = None) -> Tensor:
        """Attend from all tokens, or from the first ones only: (B, first, D).

        `bias` is added to the scores; it broadcasts to (B, H, N, N). `first` is the number of leading tokens to return.
        """
        q, k, v = self.heads(x_BND)
        if first is not None:
            q, bias = q[:, :, :first], bias if bias is None else bias[..., :first, :]
        return self.merge(F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=self.scale))


def without_content(model: nn.Module) -> nn.Module | None:
    """Return a copy of the model whose scores are all 0, or None if nothing in the model has scores.

    The softmax then depends on positions alone (biases, gates), with uniform weights where there are none. This equals
    W_Q = W_K = 0 where these serve only the scores.
    """
    model = copy.deepcopy(model)
    attentions = [module for module in model.modules() if isinstance(module, SoftmaxAttention)]
    for module in attentions:
        module.heads = partial(_scoreless, module.heads)  # type: ignore[method-assign]
    return model if attentions else None


def _scoreless(
    heads: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]], x_BND: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = heads(x_BND)
    return torch.zeros_like(q), k, v


class QKVAttention(SoftmaxAttention):
    """Abstract: q, k and v are projections of the same tokens by one matrix, as in timm; a variant defines `scores`.

    Args:
        dim: width of the tokens.
        num_heads: number of heads.
        qkv_bias: whether the projections have a bias.
        proj_bias: whether W_O has a bias.
        q_cap: cap on the spectral norm of the whole W_Q (None: free).
        k_cap: the same for W_K.
        v_cap: the same for W_V.
        o_cap: the same for W_O.
    """

    power_3HD: Tensor
    power_o_1D: Tensor

    def __init__(
        self,
        dim: int,
        num_heads: int,
        qkv_bias: bool = True,
        proj_bias: bool = True,
        q_cap: float | None = None,
        k_cap: float | None = None,
        v_cap: float | None = None,
        o_cap: float | None = None,
    ) -> None:
        super().__init__()
        check_heads(dim, num_heads)
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim, bias=proj_bias)
        # The vectors of MSVP's power iteration (zoo.penalty), kept with the weights they belong to.
        self.register_buffer("power_3HD", start_vectors(3, num_heads, dim))
        self.register_buffer("power_o_1D", start_vectors(1, dim))
        self._caps = ((q_cap, k_cap, v_cap), (o_cap,))

    def scores(self, q_BHNO: Tensor, k_BHNO: Tensor, v_BHNO: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Turn the projections into the q, k and v of `heads`."""
        raise NotImplementedError

    def heads(self, x_BND: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.scores(*self.projections(x_BND))

    def projections(self, x_BND: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return X W_Q, X W_K, X W_V with their biases, head by head: (B, H, N, O) each."""
        q, k, v = self.qkv(x_BND).unflatten(-1, (3, self.num_heads, -1)).transpose(1, 3).unbind(2)
        return q, k, v

    def merge(self, y_BHNO: Tensor) -> Tensor:
        return self.proj(y_BHNO.transpose(1, 2).flatten(2))

    def finish_init(self) -> None:
        """Put the caps on. The model calls this once its weights have their initial values."""
        cap_(self.qkv, self._caps[0])
        cap_(self.proj, self._caps[1])

    def head_weights_3HOD(self) -> Tensor:
        """Return W_Q^l, W_K^l, W_V^l of every head: the OUTPUT rows of the stored weight.

        See docs/references.md#erratum-specformer-heads.
        """
        return self.qkv.weight.unflatten(0, (3, self.num_heads, -1))

    def spectral_terms(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield the terms for `zoo.penalty`."""
        yield from zip("qkv", self.head_weights_3HOD(), self.power_3HD, strict=True)
        yield "o", self.proj.weight[None], self.power_o_1D


def check_heads(dim: int, num_heads: int) -> None:
    if dim % num_heads:
        raise UserError(f"width {dim} is not a multiple of num_heads {num_heads}; change one of them")
