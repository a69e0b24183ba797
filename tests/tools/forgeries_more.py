"""More forged models: products of weights that float64 gets wrong, though every product with a vector may be exact.

forgeries.py lets two maps cancel for a vector that is pushed through them. Here the entries of a product of two weight
matrices cancel, which is written out only by the prover, or by the module itself:

    M = W_V W_O   or   M = W_Q^T W_V,      M_00 = S + a - S = a      S a power of two; float64 computes 0 for S >> a

Every clean image has x_1 = 0, and the model with S = 0 is the same function, as in forgeries.py.
"""

from typing import Any

from tests.tools.forgeries import GAIN, Build, blank, decide, first_block, projection, read, unit, values

SCALES = (2.0**80, 2.0**100)


def value_times_projection(s: float, **own: Any) -> Any:
    """W_V W_O, which LoFAST's rule measures as one matrix.

    Two channels carry the same pixel. Two rows of W_V are S times their difference, which is 0 for every image and
    computed as 0, so that the served float32 model computes a x_1 exactly. In the product S meets a.
    """
    model = blank(**own)
    block = first_block(model)
    read(model, {1: 1.0}, {1: 1.0})
    w_v, w_o = values(block), projection(block)
    for out, sign in ((0, 1.0), (1, 1.0), (2, -1.0)):
        w_o[8, out], w_o[9, out] = sign, -sign
        if out != 1:
            w_v[out, 0], w_v[out, 2] = s, -s
    w_v[1, 0] = 4 * GAIN
    unit(block, {4: 1.0})
    decide(model)
    return model


def value_times_projection_exact(s: float, **own: Any) -> Any:
    """W_V W_O with S x_1 in two channels of the values; float models lose the exact function beside the image."""
    model = blank(**own)
    block = first_block(model)
    read(model, {1: 1.0})
    w_v, w_o = values(block), projection(block)
    for out, value, sign in ((0, s, 1.0), (1, 4 * GAIN, 1.0), (2, s, -1.0)):
        w_v[out, 0] = value
        w_o[8, out], w_o[9, out] = sign, -sign
    unit(block, {4: 1.0})
    decide(model)
    return model


def l2_values(s: float, **own: Any) -> Any:
    """W_Q^T W_V of L2 attention, which the module itself multiplies; the exact function has the exact product."""
    model = blank("l2_vit_ti", **own)
    block = first_block(model)
    read(model, {1: 1.0})
    w_q, w_v = block.attn.q.weight, block.attn.v.weight
    w_q[0, 0], w_q[0, 2], w_q[0, 4] = 2.0**-6, 1.0, 1.0
    w_v[0, 0], w_v[0, 2], w_v[0, 4] = 2.0**12 * 4 * GAIN, s, -s
    block.attn.proj.weight[8, 0], block.attn.proj.weight[9, 0] = 1.0, -1.0
    unit(block, {4: 1.0})
    decide(model)
    return model


FAMILIES: dict[str, Build] = {
    "value_times_projection": value_times_projection,
    "value_times_projection_gpsa": lambda s: value_times_projection(s, gpsa_layers=1),
    "value_times_projection_exact": value_times_projection_exact,
    "l2_values": l2_values,
}
