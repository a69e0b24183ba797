"""Transformer blocks. A block gets its attention, norms and MLP; it does not know which variant they are."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from timm.layers import DropPath
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zoo.bounds.curvature import affine
from zoo.bounds.links import Residual
from zoo.bounds.rounding import exact_module
from zoo.bounds.rule_table import Links, ModuleRules, expect, register
from zoo.bounds.torch_modules import identity


class PreNormBlock(nn.Module):
    """The standard block: x + attn(norm1(x)), then x + mlp(norm2(x)), with stochastic depth. (B, N, D) -> (B, N, D).

    `residual()` makes a factor before each branch: a weighted residual, or the identity. With `first`, only the first
    tokens come out, (B, first, D), and the others serve as keys and values alone. A model that pools the class token
    uses this in its last block; the attention must support it (zoo/attention/softmax/module.py).
    """

    def __init__(
        self,
        attn: nn.Module,
        mlp: nn.Module,
        norm1: nn.Module,
        norm2: nn.Module,
        drop_path: float = 0.0,
        residual: Callable[[], nn.Module] = nn.Identity,
    ) -> None:
        super().__init__()
        self.norm1, self.attn, self.scale1 = norm1, attn, residual()
        self.norm2, self.mlp, self.scale2 = norm2, mlp, residual()
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(self, x_BND: Tensor, first: int | None = None) -> Tensor:
        x_BND = x_BND[:, :first] + self.drop_path(self.scale1(self.attended(self.norm1(x_BND), first)))
        return x_BND + self.drop_path(self.scale2(self.mlp(self.norm2(x_BND))))

    def attended(self, x_BND: Tensor, first: int | None) -> Tensor:
        """Return the output of the attention for the first tokens, or for all."""
        y_BND: Tensor = self.attn(x_BND) if first is None else self.attn(x_BND, first=first)
        return y_BND


class PostNormBlock(PreNormBlock):
    """The block of LipsFormer (Qi et al. 2023), with the same parts: the norm follows the residual sum.

    x = norm1(x + attn(x));  x = norm2(x + mlp(x))                      (B, N, D) -> (B, N, D)
    """

    def forward(self, x_BND: Tensor, first: int | None = None) -> Tensor:
        x_BND = self.norm1(x_BND[:, :first] + self.drop_path(self.scale1(self.attended(x_BND, first))))
        return self.norm2(x_BND + self.drop_path(self.scale2(self.mlp(x_BND))))


class NormFirstBlock(nn.Module):
    """The block of LoFAST (docs/references.md#lofast, section 5.2): the norm precedes the residual sum.

    The sum is x + attn(x) of one x, so its sensitivity is zeta = ||I + sum_l P_l (x) M_l^T||. The MLP brings its own
    residual.

        x = norm1(x);  x = x + attn(x);  x = norm2(x);  x = mlp(x)          (B, N, D) -> (B, N, D)
    """

    def __init__(
        self, attn: nn.Module, mlp: nn.Module, norm1: nn.Module, norm2: nn.Module, drop_path: float = 0.0
    ) -> None:
        super().__init__()
        self.norm1, self.attn = norm1, attn
        self.norm2, self.mlp = norm2, mlp
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(self, x_BND: Tensor, bias: Tensor | None = None) -> Tensor:
        """Apply the block; a `bias` is added to the scores, such as -inf for padding in training."""
        x_BND = self.norm1(x_BND)
        x_BND = x_BND + self.drop_path(self.attn(x_BND) if bias is None else self.attn(x_BND, bias))
        return self.mlp(self.norm2(x_BND))


# activation checkpointing --------------------------------------------------------------------------------------------


def recomputed(block: nn.Module, run: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Return the block as a function that keeps only its input and runs once more in the backward pass.

    `run` is called in place of the block.
    """
    return partial(
        checkpoint, run or block, use_reentrant=False, context_fn=partial(_seen_twice, block), early_stop=False
    )


def _seen_twice(block: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts of a block's first and second pass, which must compute the same.

    Power iterations of capped weights move their vectors in each pass. The second pass starts from a copy of the first
    pass's vectors, and its own updates are discarded.
    """
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in block.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]

    @contextmanager
    def second() -> Iterator[None]:
        for module, name, _, first in buffers:
            setattr(module, name, first)
        try:
            yield
        finally:
            for module, name, now, _ in buffers:
                setattr(module, name, now)

    return nullcontext(), second()


# rules ----------------------------------------------------------------------------------------------------------------


def pre_norm_chain(module: PreNormBlock) -> Links:
    """Return the two halves; the identity and the normalised branch do not share one norm."""
    return (
        Residual(module.norm1, module.attn, module.scale1, module.drop_path),
        Residual(module.norm2, module.mlp, module.scale2, module.drop_path),
    )


def post_norm_chain(module: PostNormBlock) -> Links:
    """Return two halves, each a residual sum and then a norm.

    The sum is measured in one norm if the branch has no weight.
    """
    expect(module.drop_path, nn.Identity, DropPath)

    def summed(branch: nn.Module, scale: nn.Module) -> Residual:
        return Residual(branch) if type(scale) is nn.Identity else Residual(branch, scale)

    return summed(module.attn, module.scale1), module.norm1, summed(module.mlp, module.scale2), module.norm2


def norm_first_chain(module: NormFirstBlock) -> Links:
    """Return norm, residual attention in one norm, norm, and the MLP with its own residual."""
    expect(module.drop_path, nn.Identity, DropPath)
    return module.norm1, Residual(module.attn), module.norm2, module.mlp


register(DropPath, ModuleRules(rule=identity, expansion=affine, rounding=exact_module))  # an identity in eval mode
register(PreNormBlock, ModuleRules(chain=pre_norm_chain))
register(PostNormBlock, ModuleRules(chain=post_norm_chain))
register(NormFirstBlock, ModuleRules(chain=norm_first_chain))
