"""Ascent attacks the rules of first and second order of every primitive, and its rounding is followed at the image."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.tools.ascent import largest_change
from tests.tools.expansions import Instance, largest_gain, tightness
from zoo.bounds import float_error
from zoo.bounds.curvature import expansion_of, nodes_of
from zoo.bounds.first_order import layer_of
from zoo.bounds.rounding import PRECISIONS, roundings_of
from zoo.bounds.rule_table import NoRule, rules_of
from zoo.bounds.tape import Tape
from zoo.primitives import PRIMITIVES
from zoo.primitives.activations import Abs
from zoo.primitives.branches import Branches
from zoo.primitives.diagonal import Diagonal
from zoo.primitives.folded import Folded
from zoo.primitives.gates import Gate
from zoo.primitives.jumps import SoftplusJump
from zoo.primitives.moves import Move, Reshape
from zoo.primitives.pooling import Mean, WindowMax
from zoo.primitives.sorting import Sorted

IMAGE = (4, 6, 6)
Make = Callable[[], nn.Module]


def batch_norm(kind: type[nn.BatchNorm1d | nn.BatchNorm2d]) -> nn.Module:
    module = kind(4)
    assert module.running_mean is not None
    assert module.running_var is not None
    module.running_mean.normal_()
    module.running_var.uniform_(0.01, 3)
    nn.init.normal_(module.weight)
    nn.init.normal_(module.bias)
    return module


def move() -> nn.Module:
    """Return entries of one image, some repeated, some left out, and constants."""
    return Move(torch.randint(-20, 144, (3, 50)), IMAGE, torch.randn(3, 50))


def group_norm() -> nn.Module:
    module = nn.GroupNorm(2, 4, eps=0.01)
    nn.init.normal_(module.weight)
    return module


def branches() -> nn.Module:
    """Return a sum of three branches: a convolution, one with a bend, and the identity."""
    bent = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 4, 1))
    return Branches(nn.Sequential(nn.Conv2d(4, 4, 1)), bent, nn.Sequential())


def conv_and_norm() -> nn.Module:
    """Return a grouped convolution with stride between a factor of every channel and batch normalisation."""
    factor = Diagonal(torch.randn(4, 1, 1), torch.randn(4, 6, 6))
    return Folded(factor, nn.Conv2d(4, 4, 3, 2, 1, groups=2), batch_norm(nn.BatchNorm2d))


def linear_and_norm(*, front: bool) -> nn.Module:
    """Return a linear layer behind or in front of batch normalisation of vectors."""
    parts = [nn.Linear(4, 4), batch_norm(nn.BatchNorm1d)]
    return Folded(*parts[:: -1 if front else 1])


def gate() -> nn.Module:
    """Return a convolution times the sigmoid of another."""
    return Gate(nn.Sequential(nn.Conv2d(4, 4, 1)), nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Sigmoid()))


@dataclass(frozen=True)
class Case:
    """A module, the share of its bound that ascent must reach, the shape of one image, and how loose beta may be."""

    make: Make
    teeth: float
    shape: tuple[int, ...] = IMAGE
    loose: float = 1.5


def prelu() -> nn.Module:
    module = nn.PReLU(4)
    nn.init.normal_(module.weight)
    return module


CASES: dict[str, Case] = {
    "diagonal": Case(lambda: Diagonal(torch.randn(4, 1, 1), torch.randn(4, 6, 6)), 0.8),
    "quotient": Case(lambda: Diagonal(0.1 + torch.rand(4, 1, 1), torch.randn(()), divides=True), 0.8),
    "batch norm": Case(lambda: batch_norm(nn.BatchNorm2d), 0.8),
    "batch norm of vectors": Case(lambda: batch_norm(nn.BatchNorm1d), 0.8, (4,)),
    "conv and norm": Case(conv_and_norm, 0.8),
    "linear and norm": Case(lambda: linear_and_norm(front=False), 0.8, (4,)),
    "norm and linear": Case(lambda: linear_and_norm(front=True), 0.8, (4,)),
    "linear and factor": Case(lambda: Folded(nn.Linear(6, 6), Diagonal(torch.randn(6), torch.randn(6))), 0.8),
    "move": Case(move, 0.8),
    "reshape": Case(lambda: Reshape(IMAGE, (36, 4)), 0.99),
    "mean": Case(lambda: Mean((2, 3)), 0.95),
    "mean of tokens": Case(lambda: Mean((1,)), 0.95, (5, 6)),
    "window max": Case(WindowMax, 0.6, (4, 9, 4)),
    "sorted pairs": Case(Sorted, 0.8, (4, 9, 2)),
    "sorted groups": Case(Sorted, 0.8, (4, 5, 5)),
    "sorted vectors": Case(Sorted, 0.8, (6,)),
    "softmax": Case(lambda: nn.Softmax(-1), 0.5, (3, 4), loose=3.0),
    "softmax of vectors": Case(lambda: nn.Softmax(-1), 0.5, (4,), loose=2.0),
    "max pool": Case(lambda: nn.MaxPool2d(3, 2, 1), 0.3),
    "max pool, disjoint": Case(lambda: nn.MaxPool2d(2), 0.6),
    "average pool": Case(lambda: nn.AvgPool2d(2), 0.9),
    "average pool, overlapping": Case(lambda: nn.AvgPool2d(3, 1, 1), 0.8),
    "adaptive average pool": Case(lambda: nn.AdaptiveAvgPool2d(1), 0.9),
    "adaptive average pool to 2": Case(lambda: nn.AdaptiveAvgPool2d(2), 0.9),
    "group norm": Case(group_norm, 0.3),
    "branches": Case(branches, 0.3),
    "gate": Case(gate, 0.2, loose=6.0),
    "square": Case(lambda: Gate(nn.Sequential(), nn.Sequential()), 0.8),
    "jump of softplus": Case(lambda: SoftplusJump(1.5, 0.5), 0.2, (3, 4), loose=20.0),
    "modulus": Case(Abs, 0.8),
    "leaky relu": Case(lambda: nn.LeakyReLU(0.3), 0.8),
    "steep leaky relu": Case(lambda: nn.LeakyReLU(-1.5), 0.8),
    "prelu": Case(prelu, 0.8),
    "hardtanh": Case(lambda: nn.Hardtanh(-0.5, 2.0), 0.8),
    "relu6": Case(nn.ReLU6, 0.8),
    "elu": Case(nn.ELU, 0.8),
    "steep elu": Case(lambda: nn.ELU(1.5), 0.6),
    "flat elu": Case(lambda: nn.ELU(0.4), 0.8),
    "celu": Case(lambda: nn.CELU(2.0), 0.8),
    "narrow celu": Case(lambda: nn.CELU(0.3), 0.8),
    "selu": Case(nn.SELU, 0.5),
    "mish": Case(nn.Mish, 0.8),
    "hardswish": Case(nn.Hardswish, 0.5),
    "hardsigmoid": Case(nn.Hardsigmoid, 0.4),
}
SECOND = [name for name, case in CASES.items() if rules_of(case.make()).expansion or name == "branches"]


def instances(case: Case, seed: int, modules: int = 3, inputs: int = 6) -> Iterator[tuple[nn.Module, Tensor, Tensor]]:
    """Yield modules, inputs of sizes around 1 and radii from a thousandth of them to their length."""
    torch.manual_seed(seed)
    for _ in range(modules):
        module = case.make().double().eval().requires_grad_(False)
        size = 10 ** torch.empty(inputs).uniform_(-0.5, 0.7).double()
        x = torch.randn(inputs, *case.shape).double() * size.view(-1, *(1,) * len(case.shape))
        yield module, x, x.flatten(1).norm(dim=1) * 10 ** torch.empty(inputs).uniform_(-3, 0).double()


def test_every_primitive_has_a_case() -> None:
    assert {type(case.make()) for case in CASES.values()} == set(PRIMITIVES)


@pytest.mark.parametrize("name", CASES)
def test_no_ascent_beats_the_first_order(name: str) -> None:
    case, shares = CASES[name], list[Tensor]()
    for module, x, r_B in instances(case, 0):
        y, bound = layer_of(module)(x)
        torch.testing.assert_close(y, module(x))
        shares.append(largest_change(module, x, r_B) / bound(r_B))
        values = torch.stack([bound(r_B * factor) for factor in (0.0, 1e-3, 1.0, 1.001, 1e3, torch.inf)])
        assert (values[0] == 0).all()
        assert (values.diff(dim=0)[:-1] >= 0).all()
        assert (values[-1] == torch.inf).all()
    assert torch.cat(shares).max() <= 1 + 1e-9
    assert torch.cat(shares).max() >= case.teeth, "the search is too weak"


@pytest.mark.parametrize("name", SECOND)
def test_no_ascent_beats_the_second_order(name: str) -> None:
    case = CASES[name]
    if name == "branches":
        pytest.skip("a link has no expansion of its own; see the test of sums")
    found = [
        Instance(module, x, torch.randn(2, *module(x).shape).double(), r_B) for module, x, r_B in instances(case, 1)
    ]
    tight = tightness(found, steps=20, starts=2)  # raises where a bound is beaten
    for instance in found:
        check(instance)
    if not instance.expansion().affine:
        assert tight["beta"].min() < case.loose, "the search is too weak"


def check(instance: Instance) -> None:
    """Check that J is the derivative, that push is its transpose, and that bounds start at 0 and grow."""
    expansion, v = instance.expansion(), torch.randn_like(instance.x)[None]
    y, moved = torch.func.jvp(instance.module, (instance.x,), (v[0],))[:2]
    torch.testing.assert_close(expansion.push(v)[0], moved)
    g = torch.randn_like(y)[None]
    torch.testing.assert_close((g * expansion.push(v)).sum(), (expansion.pull(g) * v).sum())
    for bound in (expansion.beta, lambda r: expansion.remainder(instance.g)(r[None])):
        values = torch.stack([bound(instance.r_B * factor) for factor in (0.0, 1e-3, 1.0, 1e3, torch.inf)])
        assert (values[0] == 0).all()
        assert (values.diff(dim=0)[:-1] >= -1e-12 * values[1:-1]).all()
        assert not values.isnan().any()
    assert (expansion.gain_B >= largest_gain(instance) * (1 - 1e-9)).all()


def test_a_sum_is_expanded_and_laid_out_like_its_function() -> None:
    torch.manual_seed(0)
    module = branches().double().eval().requires_grad_(False)
    x, v = torch.randn(3, *IMAGE).double(), torch.randn(1, 3, *IMAGE).double()
    ((layer, expand),) = nodes_of(module)
    expansion = expand(x)
    torch.testing.assert_close(expansion.y, module(x))
    moved = torch.func.jvp(module, (x,), (v[0],))[1]
    g = torch.randn_like(v)
    torch.testing.assert_close(expansion.push(v)[0], moved)
    torch.testing.assert_close((g * moved).sum(), (expansion.pull(g) * v).sum())
    end = expand(expansion.y)  # a second sum, so that the whole first one lies before a leaf
    tape, seen = Tape([expansion, end]), dict[int, Tensor]()
    first = tape.of_nodes[1][0]
    tape.push(v, lambda at, arrived: seen.__setitem__(at, arrived), first)
    torch.testing.assert_close(seen[first][0], moved)
    torch.testing.assert_close(Tape([expansion]).pull(g, {}, ())[0], expansion.pull(g))
    r_B = torch.tensor([0.01, 0.1, 1.0]).double()
    found_B = largest_change(lambda z: module(z) - module(x.repeat(len(z) // 3, 1, 1, 1)), x, r_B)
    assert (found_B <= layer(x)[1](r_B)).all()

    def rest(z: Tensor) -> Tensor:
        gap = z - x.repeat(len(z) // 3, 1, 1, 1)
        return module(z) - module(z - gap) - expansion.push(gap.unflatten(0, (-1, 3))).flatten(0, 1)

    assert (largest_change(rest, x, r_B, 20, 2) <= expansion.beta(r_B) * (1 + 1e-9)).all()


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if type(case.make()) is not Branches])
def test_the_rounding_at_the_image_is_followed(name: str) -> None:
    """Compute in float64, follow the error, and compare with the same images in float32, off by 1e-7."""
    for module, x, _ in instances(CASES[name], 2, modules=1):
        y = module(x)
        assert (float_error.defect(module, x, y) <= 1e-11 * (1 + y.abs())).all()
        assert (float_error.defect(module, x, y + 1e-6) >= 1e-6).all()


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if rules_of(case.make()).rounding])
def test_the_served_module_stays_within_its_rounding(name: str) -> None:
    for module, x, _ in instances(CASES[name], 3, modules=2):
        served = module.float()
        exact = CASES[name].make().double().eval()
        exact.load_state_dict(module.state_dict())
        (rounding,) = roundings_of(exact, PRECISIONS[torch.float32])
        images, off_B = x.float(), torch.zeros(len(x)).double()
        if any(buffer.dtype is torch.int64 and buffer.ndim for _, buffer in module.named_buffers()):
            exact = module  # indices were drawn anew
        error_B = (served(images).double() - exact.double()(images.double())).flatten(1).norm(dim=1)
        assert (error_B <= rounding(images.double()).error(off_B, off_B) + 1e-30).all()


@pytest.mark.parametrize("gap", [3.0, 40.0, 800.0])
def test_a_saturated_softmax_may_change_far_away(gap: float) -> None:
    """Bounds still grow where 1 - p rounds to 0, or the other entries underflow."""
    module, x = nn.Softmax(-1), torch.tensor([[gap, 0, 0, 0, 0]]).double()
    y, bound = layer_of(module)(x)
    expansion = expansion_of(module)(x)
    for share in torch.linspace(0.05, 1.5, 30).double():
        move = share * gap * torch.tensor([[-5, 1, 1, 1, 1]]).double() / 6
        r_B = move.norm(dim=1)
        change, rest = module(x + move) - y, module(x + move) - y - expansion.push(move[None])[0]
        assert change.norm() <= bound(r_B)
        assert rest.norm() <= expansion.beta(r_B)
        for g in (*torch.eye(5).double(), *-torch.eye(5).double()):
            assert -(g * rest).sum() <= expansion.remainder(g[None, None])(r_B[None]) * (1 + 1e-9)


def test_the_jump_is_that_of_the_entries_within_reach() -> None:
    module = SoftplusJump(1.0, 2.0)
    apart = torch.tensor([[1e-3, 2e-3, -1e-3, 1.0]]).double()
    move = -apart * torch.tensor([1, 1, 0, 0]) * (1 + 1e-6)  # to the other side
    change = (module(2 + apart + move) - module(2 + apart)).norm()
    bound = layer_of(module)(2 + apart)[1]
    assert 0.9 * bound(move.norm(dim=1)) <= change <= bound(move.norm(dim=1))
    assert bound(torch.tensor([1e-4]).double()) < 1e-4


def test_what_is_not_the_stated_function_is_refused() -> None:
    x = torch.rand(2, *IMAGE).double()
    with pytest.raises(NoRule, match="entries must stay"):
        layer_of(Diagonal(torch.ones(6, 4, 6, 6).double(), torch.zeros(()).double()))(x[:1])
    with pytest.raises(NoRule, match="track_running_stats"):
        layer_of(nn.BatchNorm2d(4, track_running_stats=False).eval())
    with pytest.raises(NoRule, match="beyond"):
        layer_of(Move(torch.tensor([144]), IMAGE))
    with pytest.raises(NoRule, match="made for inputs"):
        layer_of(Reshape((4, 36), (36, 4)))(x)
    with pytest.raises(NoRule, match="different divisors"):
        layer_of(nn.AvgPool2d(3, 2, 1, count_include_pad=False))(x)
    with pytest.raises(NoRule, match="broadcast"):
        layer_of(nn.PReLU(6).double())(x.permute(0, 2, 1, 3)[:, :3])


def test_only_factors_of_channels_are_folded() -> None:
    """Each of these would be broadcast, and the norm of the folded weights would be another map's."""
    images, tokens = torch.rand(2, 4, 6, 6).double(), torch.rand(2, 4, 4).double()
    rows = Diagonal(torch.rand(6, 1), torch.zeros(()))
    for module, x in (
        (Folded(nn.Conv2d(4, 6, 1), rows), images),
        (Folded(nn.Linear(4, 4), batch_norm(nn.BatchNorm1d)), tokens),
        (Folded(nn.Linear(6, 4), batch_norm(nn.BatchNorm2d)), images),
        (Folded(nn.Linear(4, 4), Diagonal(torch.rand(4), torch.zeros(5, 1, 4, 4))), tokens[:1]),
        (Folded(nn.ReLU()), images),
        (Folded(nn.Linear(4, 4), nn.Linear(4, 4)), tokens),
    ):
        with pytest.raises(NoRule):
            layer_of(module.double().eval().requires_grad_(False))(x)


def test_the_norm_of_folded_weights_is_that_of_the_map() -> None:
    torch.manual_seed(0)
    module = conv_and_norm().double().eval().requires_grad_(False)
    x = torch.randn(1, *IMAGE).double()
    norm = torch.linalg.matrix_norm(torch.func.jacrev(module)(x).flatten(0, 3).flatten(1), 2)
    assert norm * (1 - 1e-12) <= layer_of(module)(x)[1](torch.ones(1).double()) <= 1.4 * norm


@pytest.mark.parametrize("options", [(2, 1, 1, 2), (1, 2, 1, 1), (2, 2, 2, 4), (1, 0, 1, 4)], ids=str)
def test_grouped_and_dilated_convolutions_have_their_norm(options: tuple[int, ...]) -> None:
    stride, padding, dilation, groups = options
    torch.manual_seed(0)
    module = nn.Conv2d(4, 8, 3, stride, padding, dilation, groups).double().requires_grad_(False)
    x, r_B = torch.randn(2, 4, 7, 8).double(), torch.ones(2).double()
    y, bound = layer_of(module)(x)
    unit = torch.eye(x[0].numel(), dtype=torch.float64).view(-1, *x.shape[1:])
    jacobian = F.conv2d(unit, module.weight, None, stride, padding, dilation, groups).flatten(1)
    norm = torch.linalg.matrix_norm(jacobian, 2)
    assert (bound(r_B) >= norm * (1 - 1e-12)).all()
    assert (bound(r_B) <= 1.4 * norm).all()
    assert (expansion_of(module)(x).gain_B >= norm * (1 - 1e-12)).all()
    assert y.shape[1] == 8
