"""Rules of torch's own modules, except LayerNorm (layers/norms.py) and Conv2d (layers/convolution.py).

Constants of activations: docs/proofs.md#hull.
"""

import torch
from torch import Tensor, nn

from zoo.bounds.activations import FAR, Hinge, Smooth
from zoo.bounds.contracts import Layer
from zoo.bounds.curvature import affine
from zoo.bounds.elementwise import scalar
from zoo.bounds.first_order import scaled
from zoo.bounds.hypotheses import Shapes
from zoo.bounds.primitives import linear_rounding
from zoo.bounds.rounding import exact_module
from zoo.bounds.rule_table import ModuleRules, NoRule, register
from zoo.spectral import sigma_upper

NO_JUMP = 40.0  # softplus is log(1 + e^{b z}) / b up to b z = threshold, then z: a jump of e^-threshold / b


def linear(module: nn.Linear) -> Layer:
    """Bound ||W x' - W x|| <= ||W|| ||x' - x||, token by token, hence for all tokens together.

    Proof: docs/proofs.md#linear.
    """
    return scaled(module, sigma_upper(module.weight))


def linear_shapes(module: nn.Linear) -> Shapes:
    """Return the shapes of W and b."""
    return {"weight": (module.out_features, module.in_features), "bias": (module.out_features,)}


def identity(module: nn.Module) -> Layer:
    """Return the rule of an identity in eval mode (dropout is off), or of a pure reshaping."""
    return scaled(module, 1.0)


register(nn.Sequential, ModuleRules(chain=list))
register(nn.Linear, ModuleRules(rule=linear, expansion=affine, rounding=linear_rounding, shapes=linear_shapes))
register(nn.Identity, ModuleRules(rule=identity, expansion=affine, rounding=exact_module))
register(nn.Dropout, ModuleRules(rule=identity, expansion=affine, rounding=exact_module))
register(nn.Flatten, ModuleRules(rule=identity, expansion=affine, rounding=exact_module))


# activations ----------------------------------------------------------------------------------------------------------


def _phi(z: Tensor) -> Tensor:
    return torch.exp(-0.5 * z.square()) * 0.3989422804014327


def _gelu_slope(z: Tensor) -> Tensor:
    return torch.special.ndtr(z) + z * _phi(z)


def _gelu_second(z: Tensor) -> Tensor:
    return (2 - z.square()) * _phi(z)


def _tanh_gelu_u(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return u = sqrt(2 / pi) (z + 0.044715 z^3), u' and u''; the function is z (1 + tanh u) / 2."""
    k = 0.7978845608028654
    return k * (z + 0.044715 * z**3), k * (1 + 0.134145 * z.square()), k * 0.26829 * z


def _tanh_gelu_slope(z: Tensor) -> Tensor:
    u, du, _ = _tanh_gelu_u(z)
    return 0.5 * (1 + u.tanh()) + 0.5 * z * du / u.cosh().square()


def _tanh_gelu_second(z: Tensor) -> Tensor:
    u, du, ddu = _tanh_gelu_u(z)
    return (du + z * (0.5 * ddu - u.tanh() * du.square())) / u.cosh().square()


def _tanh_slope(z: Tensor) -> Tensor:
    return 1 / z.cosh().square()


def _tanh_second(z: Tensor) -> Tensor:
    return -2 * z.tanh() / z.cosh().square()


def _sigmoid_slope(z: Tensor) -> Tensor:
    return z.sigmoid() * (-z).sigmoid()


def _sigmoid_second(z: Tensor) -> Tensor:
    return -_sigmoid_slope(z) * (z / 2).tanh()


# Largest derivatives and extrema of sigma'' are rounded outwards by one unit of the last printed decimal. The largest
# slope of erf-GELU is Phi(sqrt2) + sqrt2 phi(sqrt2) at sqrt2; the often quoted 1.12 is below it (docs/proofs.md#slopes,
# docs/references.md#erratum-gelu-slope). That of SiLU is at 2.39936. For both and for tanh-GELU,
# sigma'(z) + sigma'(-z) = 1, so the least slope is 1 minus the largest.
GELU = Smooth(
    _gelu_slope,
    _gelu_second,
    ((0.0, 0.7978845609), (-2.0, -0.1079819331), (2.0, -0.1079819331)),
    (1 - 1.1289041452, 1.1289041452),
    operations=1,
    steepest=0.7787696351,
    most_fourth=1.5957691217,
)
TANH_GELU = Smooth(
    _tanh_gelu_slope,
    _tanh_gelu_second,
    ((0.0, 0.7978845609), (-2.0134807246242579, -0.1079135159), (2.0134807246242579, -0.1079135159)),
    (1 - 1.1289930688, 1.1289930688),
    operations=1,
    steepest=0.7768,
    most_fourth=1.6036674523,
)
TANH = Smooth(
    _tanh_slope,
    _tanh_second,
    ((-0.6584789484624084, 0.7698003590), (0.6584789484624084, -0.7698003590)),
    (0.0, 1.0),
    operations=1,
    steepest=2.0,
    most_fourth=4.0858855030,
)


def _silu_slope(z: Tensor) -> Tensor:
    return z.sigmoid() + z * _sigmoid_slope(z)


def _silu_second(z: Tensor) -> Tensor:
    return _sigmoid_slope(z) * (2 - z * (z / 2).tanh())


SIGMOID = Smooth(
    _sigmoid_slope,
    _sigmoid_second,
    ((-1.3169578969248166, 0.0962250449), (1.3169578969248166, -0.0962250449)),
    (0.0, 0.25),
    operations=1,
    steepest=0.125,
    most_fourth=0.1276839220,
)

SILU = Smooth(
    _silu_slope,
    _silu_second,
    ((0.0, 0.5000000001), (-3.4358409935351107, -0.0369143732), (3.4358409935351107, -0.0369143732)),
    (1 - 1.0998393202, 1.0998393202),
    operations=1,
    steepest=0.3083,
    most_fourth=0.5,
)


def softplus(module: nn.Softplus) -> Smooth:
    """Return log(1 + e^{b z}) / b with sigma' = s(b z), sigma'' = b s (1 - s), where s is the sigmoid.

    The jump at the threshold must be below rounding. For b < 1, sigma'' has not vanished at FAR, where its range ends;
    beyond FAR it falls to 0.
    """
    if module.beta <= 0:
        raise NoRule(module, f"softplus has beta {module.beta:g}; create it with beta > 0")
    if module.threshold < NO_JUMP:
        raise NoRule(module, f"softplus jumps at its threshold {module.threshold:g}; create it with threshold=40")
    b = float(module.beta)
    tails = ((-FAR, -0.0), (FAR, -0.0)) if b < 1 else ()
    return Smooth(
        lambda z: (b * z).sigmoid(),
        lambda z: b * _sigmoid_slope(b * z),
        ((0.0, b / 4 * (1 + 1e-12)), *tails),
        (0.0, 1.0),
        operations=1,
        steepest=b**2 * 0.0962250449,
        most_fourth=b**3 * 0.125,
    )


register(nn.GELU, scalar(lambda module: {"none": GELU, "tanh": TANH_GELU}[module.approximate]))
register(nn.Tanh, scalar(lambda module: TANH))
register(nn.Sigmoid, scalar(lambda module: SIGMOID))
register(nn.SiLU, scalar(lambda module: SILU))
register(nn.ReLU, scalar(lambda module: Hinge()))
register(nn.Softplus, scalar(softplus))
