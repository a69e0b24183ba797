"""The proximal operator of CertViT (docs/references.md#certvit): weights shrink towards zero, each by the same amount.

    prox_t(w) = argmin_p  t ||p||_1 + 1/2 ||p - w||^2  =  sign(w) max(|w| - t, 0)          (soft threshold)

It is firmly non-expansive: ||prox(a) - prox(b)||^2 <= <prox(a) - prox(b), a - b>.
"""

from torch import Tensor


def soft_threshold(w: Tensor, t: Tensor | float) -> Tensor:
    """sign(w) max(|w| - t, 0), element by element; t >= 0 broadcasts to w. Proof: docs/proofs.md#soft-threshold."""
    return w.sign() * (w.abs() - t).clamp_min(0)


def magnitude_quantile(w: Tensor, level: float) -> Tensor:
    """The `level` quantile of |w| over the entries of w that are not zero, a scalar (0 where all are): the threshold of
    the released code, which takes level 0.1 layer by layer. Up to 16 million entries (torch.quantile)."""
    size = w[w != 0].abs()
    return size.quantile(level) if len(size) else w.new_zeros(())
