"""Embedded sentences: the input of a text model, as an image with one row a token, and batches of them.

    words -> numbers i_1 .. i_n -> rows sigmoid(E[i_j]) in [0,1]^D -> image (C, n, T),   D = C T

T is the largest number of tokens, and n <= T that of the sentence. Row j of all channels together is the embedding of
token j. A ball around this image changes embeddings, not words, and E is no part of the certified function, which
takes the image. That function has no padding: a certificate does not depend on the length to which a sentence was
padded in a file or a batch. Only training pads. Padding then gets no attention and no part of the mean, which is the
same function up to rounding.

Letters: B sentences, C channels, n tokens of a sentence, T most tokens, N tokens of the longest one, D width.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from certizoo import UserError
from zoo.bounds.hypotheses import Shapes
from zoo.bounds.rule_table import ModuleRules, register

Batch = tuple[list[str], Tensor, Tensor]
PADDING = 0  # the number of the token that fills up a sentence
SPREAD = 0.5  # standard deviation of the first values of E


class SentenceEmbed(nn.Module):
    """The words E and the way from an embedded sentence to tokens: (B, C, n, T) -> (B, n, D).

    Attributes are named as in timm's `PatchEmbed`: a token is a patch of one row.

    Args:
        tokens: the largest number of tokens.
        width: of an embedding.
        vocabulary: the number of words.
    """

    def __init__(self, tokens: int, width: int, vocabulary: int) -> None:
        super().__init__()
        if width % tokens:
            raise UserError(f"embed_dim={width} is not a multiple of img_size={tokens} tokens; change one of them")
        self.patch_size, self.grid_size, self.num_patches = (1, tokens), (tokens, 1), tokens
        self.words = nn.Parameter(torch.empty(vocabulary, width))
        nn.init.normal_(self.words, std=SPREAD)

    def embed(self, numbers_BN: Tensor) -> Tensor:
        """Return embedded sentences of n tokens each: (B, n) -> (B, C, n, T) in [0,1]."""
        rows_BND = F.embedding(numbers_BN, self.words).sigmoid()
        return rows_BND.unflatten(2, (-1, self.num_patches)).transpose(1, 2)

    def forward(self, x_BCNT: Tensor) -> Tensor:
        return x_BCNT.transpose(1, 2).flatten(2)


def sentence_shapes(module: SentenceEmbed) -> Shapes:
    """Return the shape of E, which the certified function does not read."""
    return {"words": None}


register(SentenceEmbed, ModuleRules(shapes=sentence_shapes))  # the rules around it read its parts


# batches -------------------------------------------------------------------------------------------------------------


def embed_of(model: nn.Module) -> SentenceEmbed | None:
    """Return the embedding of a text model, None for a model of images."""
    embed = getattr(model, "patch_embed", None)
    return embed if isinstance(embed, SentenceEmbed) else None


def lengths_of(numbers_BT: Tensor) -> Tensor:
    """Return the number of tokens of each sentence; padding is at the end only. Raises UserError for an empty one."""
    kept_BT = numbers_BT != PADDING
    lengths_B = kept_BT.sum(1)
    if not bool((kept_BT.int().diff(dim=1) <= 0).all() & (lengths_B > 0).all()):
        raise UserError("a sentence is empty or has padding before its end; write the shards of text again")
    return lengths_B


def by_length(model: nn.Module, keys: Sequence[str], given: Tensor, labels_B: Tensor) -> Iterator[Batch]:
    """Yield a batch as the model takes it: images as they are, sentences embedded and in one batch a length."""
    embed = embed_of(model)
    if embed is None or given.is_floating_point():
        yield list(keys), given, labels_B
        return
    lengths_B = lengths_of(given)
    for length in lengths_B.unique().tolist():
        index = (lengths_B == length).nonzero().flatten()
        with torch.no_grad():
            x_BCNT = embed.embed(given[index, :length]).contiguous()
        yield [keys[i] for i in index.tolist()], x_BCNT, labels_B[index]


def padded(model: Any, x_BCNT: Tensor, kept_BN: Tensor) -> Tensor:
    """Return the logits of sentences that are padded to one length; `kept_BN` is False for padding."""
    bias_B11N = torch.zeros_like(kept_BN, dtype=x_BCNT.dtype).masked_fill(~kept_BN, -torch.inf)[:, None, None]
    x_BND = model.embed(x_BCNT)
    for block in model.blocks:
        x_BND = block(x_BND, bias_B11N)
    kept_BN1 = kept_BN[..., None]
    mean_BD = (model.norm(x_BND) * kept_BN1).sum(1) / kept_BN1.sum(1)
    logits_BK: Tensor = model.head(model.fc_norm(mean_BD))
    return logits_BK


class Padded(nn.Module):
    """A text model on padded sentences (B, C, N, T), as an attack of training takes it."""

    def __init__(self, model: nn.Module, kept_BN: Tensor) -> None:
        super().__init__()
        self.model, self.kept_BN = model, kept_BN

    def forward(self, x_BCNT: Tensor) -> Tensor:
        return padded(self.model, x_BCNT, self.kept_BN)

    def still(self, images_BCNT: Tensor, x_BCNT: Tensor) -> Tensor:
        """Return the points of an attack with padding as it was, so that it takes no part of the radius."""
        return torch.where(self.kept_BN[:, None, :, None], x_BCNT, images_BCNT)
