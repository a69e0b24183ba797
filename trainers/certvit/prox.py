"""CertViT's proximal operator (docs/references.md#certvit): all weights shrink towards zero by the same amount.

    prox_t(w) = argmin_p  t ||p||_1 + 1/2 ||p - w||^2  =  sign(w) max(|w| - t, 0)          (soft threshold)

It is firmly non-expansive: ||prox(a) - prox(b)||^2 <= <prox(a) - prox(b), a - b>.
"""

from torch import Tensor


def soft_threshold(w: Tensor, t: Tensor | float) -> Tensor:
    """Return sign(w) max(|w| - t, 0) elementwise; t >= 0 broadcasts to w.

    Proof: docs/proofs.md#soft-threshold.
    """
    return w.sign() * (w.abs() - t).clamp_min(0)


def magnitude_quantile(w: Tensor, level: float) -> Tensor:
    """Return the `level` quantile of |w| over the non-zero entries of w, a scalar (0 if all are zero).

    It is the threshold of the released code, which uses level 0.1 layer by layer. torch.quantile limits w to 16 million
    entries.
    """
    size = w[w != 0].abs()
    return size.quantile(level) if len(size) else w.new_zeros(())
