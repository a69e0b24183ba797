"""Transformer blocks. A block gets its attention, norms and MLP; it does not know which variant they are."""

from collections.abc import Callable

from timm.layers import DropPath
from torch import Tensor, nn

from zoo.bounds.curvature import Node, linear, nodes, nodes_of, residual_node
from zoo.bounds.rules import Layer, chain, identity, layer_of, residual, residual_layer_of, rule

rule(DropPath)(identity)  # an identity in eval mode


class PreNormBlock(nn.Module):
    """The standard block: x + attn(norm1(x)), then x + mlp(norm2(x)), with stochastic depth. (B, N, D) -> (B, N, D).

    `residual()` makes a factor in front of each branch: a weighted residual, or nothing.
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

    def forward(self, x_BND: Tensor) -> Tensor:
        x_BND = x_BND + self.drop_path(self.scale1(self.attn(self.norm1(x_BND))))
        return x_BND + self.drop_path(self.scale2(self.mlp(self.norm2(x_BND))))


class PostNormBlock(PreNormBlock):
    """The block of LipsFormer (Qi et al. 2023), of the same parts: the norm stands behind the residual sum.

    x = norm1(x + attn(x));  x = norm2(x + mlp(x))                      (B, N, D) -> (B, N, D)
    """

    def forward(self, x_BND: Tensor) -> Tensor:
        x_BND = self.norm1(x_BND + self.drop_path(self.scale1(self.attn(x_BND))))
        return self.norm2(x_BND + self.drop_path(self.scale2(self.mlp(x_BND))))


class NormFirstBlock(nn.Module):
    """The block of LoFAST (paper 004, section 5.2): the norm stands in front of the residual sum, so that the sum is
    x + attn(x) of ONE x and its sensitivity is zeta = ||I + sum_l P_l (x) M_l^T||; the MLP brings its own residual.

        x = norm1(x);  x = x + attn(x);  x = norm2(x);  x = mlp(x)          (B, N, D) -> (B, N, D)
    """

    def __init__(
        self, attn: nn.Module, mlp: nn.Module, norm1: nn.Module, norm2: nn.Module, drop_path: float = 0.0
    ) -> None:
        super().__init__()
        self.norm1, self.attn = norm1, attn
        self.norm2, self.mlp = norm2, mlp
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(self, x_BND: Tensor) -> Tensor:
        x_BND = self.norm1(x_BND)
        x_BND = x_BND + self.drop_path(self.attn(x_BND))
        return self.mlp(self.norm2(x_BND))


@rule(PreNormBlock)
def pre_norm_block(module: PreNormBlock) -> Layer:
    """Each half is r + branch(norm(r)); the identity and the normalised branch do not share one norm here."""

    def half(*branch: nn.Module) -> Layer:
        return residual(chain(layer_of(part) for part in (*branch, module.drop_path)))

    return chain([half(module.norm1, module.attn, module.scale1), half(module.norm2, module.mlp, module.scale2)])


@rule(PostNormBlock)
def post_norm_block(module: PostNormBlock) -> Layer:
    """Each half is a residual sum, then a norm. The sum is measured in one norm where nothing weighs the branch."""
    layer_of(module.drop_path)

    def summed(branch: nn.Module, scale: nn.Module) -> Layer:
        if type(scale) is nn.Identity:
            return residual_layer_of(branch)
        return residual(chain([layer_of(branch), layer_of(scale)]))

    attn, mlp = summed(module.attn, module.scale1), summed(module.mlp, module.scale2)
    return chain([attn, layer_of(module.norm1), mlp, layer_of(module.norm2)])


@rule(NormFirstBlock)
def norm_first_block(module: NormFirstBlock) -> Layer:
    """norm, residual attention in one norm, norm, MLP: a plain composition."""
    layer_of(module.drop_path)
    return chain([layer_of(module.norm1), residual_layer_of(module.attn), layer_of(module.norm2), layer_of(module.mlp)])


# second order ---------------------------------------------------------------------------------------------------------

linear(DropPath)


@nodes(PreNormBlock)
def pre_norm_nodes(module: PreNormBlock) -> list[Node]:
    """Two halves."""
    return [
        residual_node(module.norm1, module.attn, module.scale1, module.drop_path),
        residual_node(module.norm2, module.mlp, module.scale2, module.drop_path),
    ]


@nodes(PostNormBlock)
def post_norm_nodes(module: PostNormBlock) -> list[Node]:
    """Two residual sums, each with the norm behind it."""
    sums = ((module.attn, module.scale1, module.norm1), (module.mlp, module.scale2, module.norm2))
    return [node for branch, scale, norm in sums for node in (_weighted(branch, scale), *nodes_of(norm))]


def _weighted(branch: nn.Module, scale: nn.Module) -> Node:
    return residual_node(branch) if type(scale) is nn.Identity else residual_node(branch, scale)


@nodes(NormFirstBlock)
def norm_first_nodes(module: NormFirstBlock) -> list[Node]:
    """norm, residual attention, norm, MLP with a residual of its own."""
    return [*nodes_of(module.norm1), residual_node(module.attn), *nodes_of(module.norm2), *nodes_of(module.mlp)]
