"""Attention within windows as attention of all tokens of an image, with a mask that keeps the windows apart.

    (batch * windows, heads, n, width)  <->  (batch, heads, N, width),      M_ij = -inf for i and j in different windows

The softmax is 0 where M is -inf, at every input, so both are the same function.

Letters: G windows of the batch, H heads, K tokens of a window, N tokens of an image, O width of a head.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from certify.graph.export import BATCH
from certify.graph.values import Unmapped, Value


@dataclass(frozen=True)
class Windows:
    """The image (G, 1) and the tokens (G, K) of every window. Each token of an image is in one of them."""

    image: Tensor
    tokens: Tensor

    @staticmethod
    def of(value: Value) -> "Windows":
        """Return the windows of queries, keys or values (G, H, K, O), entries of the tokens of a linear layer."""
        if len(value.node.shape) != 2:
            raise Unmapped("attention in windows whose queries, keys or values are not a linear map of the tokens")
        tokens, width = value.node.shape
        row = value.index // width
        of_window = row[:, 0, :, 0]
        image, token = of_window // tokens, of_window % tokens
        every = torch.equal(of_window.flatten().sort().values, torch.arange(BATCH * tokens))
        if not every or bool((row != row[:, :1, :, :1]).any()) or bool((image != image[:, :1]).any()):
            raise Unmapped("attention in windows that do not divide the tokens of every image")
        return Windows(image[:, :1], token)

    def same(self, other: "Windows") -> bool:
        return torch.equal(self.image, other.image) and torch.equal(self.tokens, other.tokens)

    def joined(self, value: Value) -> Value:
        """(G, H, K, O) -> (BATCH, H, N, O)."""
        _, heads, _, width = value.shape
        whole = value.index.new_empty(BATCH, self.tokens.numel() // BATCH, heads, width)
        whole[self.image, self.tokens] = value.index.transpose(1, 2)
        return Value(value.node, whole.transpose(1, 2))

    def apart(self, value: Value) -> Value:
        """(BATCH, H, N, O) -> (G, H, K, O)."""
        return Value(value.node, value.index.transpose(1, 2)[self.image, self.tokens].transpose(1, 2))

    def mask(self, mask: Tensor | None) -> Tensor:
        """Return M (BATCH, 1 or H, N, N) for the mask of windows (G, 1 or H, 1 or K, 1 or K)."""
        windows, tokens = self.tokens.shape
        given = torch.zeros(windows, 1, 1, 1).double() if mask is None else mask
        given = given.expand(windows, given.shape[1], tokens, tokens)
        many = self.tokens.numel() // BATCH
        whole = torch.full((BATCH, many, many, given.shape[1]), -torch.inf, dtype=torch.float64)
        whole[self.image[:, :, None], self.tokens[:, :, None], self.tokens[:, None]] = given.permute(0, 2, 3, 1)
        return whole.permute(0, 3, 1, 2)
