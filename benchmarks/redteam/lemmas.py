"""Ascent on the promise of every module in the registry, on random modules, inputs and radii.

    radius, local   |f(x + G) - f(x)| <= lip(r)
    remainder       -<g, R(G)> <= rem(r)
    beta, gain      |R(G)| <= beta(r),  |J| <= gain
    gradient, rest  -<g, R(H)> <= <H, C H> / 2 + s,  |w r(H)|^2 <= <H, C H>      of forms, within reaches
    size, shrink    C <= largest,  C(small reach) <= t C(large reach)
    core            the forms of attention's core, within the reaches of its scores and values
    rounding        |served(x^) - f(x')| <= error(r, e)

The searches and the modules are those of tests/tools; the seeds of the tests come before these.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import count

import torch
from torch import Tensor, nn

from benchmarks.redteam.finding import Finding
from tests.tools import (
    attention_cases,
    attention_cores,
    curvature_cases,
    first_order_cases,
    form_attacks,
    served_modules,
)
from tests.tools import attention_variants as variants
from tests.tools.ascent import ascend
from tests.tools.expansions import Instance, largest_dip, largest_gain, largest_remainder
from tests.tools.form_attacks import Attack
from zoo.bounds.contracts import QuadraticForm
from zoo.primitives import PRIMITIVES
from zoo.rules import affine, types_where

STEPS, STARTS = 30, 4
OUT = 1 + 1e-9  # outward slack of the values found
FIRST_SEED = 100  # tests use those below
Search = Callable[[int], Iterator[Finding]]


def findings(seed: int) -> Iterator[Finding]:
    """Run every search of every type, seed after seed."""
    every = searches()
    for number in count(FIRST_SEED + seed):
        for search in every:
            yield from search(number)


def searches() -> list[Search]:
    """Return one search for each type and promise in the registry.

    Primitives of captured models are attacked by tests/zoo/primitives. Raises LookupError if a type has no modules to
    try.
    """
    first, local, second = (
        [kind for kind in types_where(has) if kind not in PRIMITIVES]
        for has in (
            lambda rules: rules.rule or rules.chain,
            lambda rules: rules.local,
            lambda rules: rules.expansion not in (None, affine),
        )
    )
    instances = _instances()
    if missing := (set(first) | set(local)) - set(first_order_cases.CASES) | set(second) - set(instances):
        raise LookupError(
            f"no modules of {sorted(kind.__name__ for kind in missing)} are tried; add a case to tests/tools"
        )
    return [
        *(_first_order(kind, local=False) for kind in first),
        *(_first_order(kind, local=True) for kind in local),
        *(_second_order(kind, instances[kind]) for kind in second),
        *(_forms(kind, case) for kind, cases in curvature_cases.CASES.items() for case in cases),
        *(_core(score) for score in attention_cores.SCORES),
        *(_rounding(name) for name in served_modules.MODULES),
    ]


def _first_order(kind: type[nn.Module], local: bool) -> Search:
    make, _ = first_order_cases.CASES[kind]
    shape = first_order_cases.SHAPES.get(kind, (first_order_cases.N, first_order_cases.D))

    def search(seed: int) -> Iterator[Finding]:
        cases = first_order_cases.instances(make, shape, seed)[: 1 + 4 * (not local)]
        share = first_order_cases.reached(cases, local=local)
        yield _found(f"{'local' if local else 'radius'}: {kind.__name__}", share.nan_to_num(0.0) / OUT, seed)

    return search


def _instances() -> dict[type[nn.Module], Callable[[int], Iterator[Instance]]]:
    """Return a few modules of every nonlinear type."""

    def layers(cases: list[curvature_cases.Case]) -> Callable[[int], Iterator[Instance]]:
        return lambda seed: curvature_cases.instances(cases[seed % len(cases)], seed, 3)

    def mixture(kind: type[nn.Module]) -> Callable[[int], Iterator[Instance]]:
        return lambda seed: attention_cases.mixtures(kind, 3, seed)

    def variant(names: list[str]) -> Callable[[int], Iterator[Instance]]:
        return lambda seed: variants.instances(names[seed % len(names)], 3, seed)

    found = {kind: layers(cases) for kind, cases in curvature_cases.CASES.items()}
    found |= {kind: mixture(kind) for kind in attention_cases.MIXTURES}
    named: dict[type[nn.Module], list[str]] = {}
    for name in variants.CASES:
        named.setdefault(type(next(variants.instances(name, 1)).module), []).append(name)
    for kind, names in named.items():
        found[kind] = _in_turn(*([found[kind]] if kind in found else []), variant(names))
    return found


def _in_turn(*makers: Callable[[int], Iterator[Instance]]) -> Callable[[int], Iterator[Instance]]:
    return lambda seed: makers[seed % len(makers)](seed // len(makers))


def _second_order(kind: type[nn.Module], instances: Callable[[int], Iterator[Instance]]) -> Search:
    def search(seed: int) -> Iterator[Finding]:
        for case in instances(seed):
            yield from _of_instance(kind.__name__, case, seed)

    return search


def _of_instance(name: str, case: Instance, seed: int) -> Iterator[Finding]:
    """Attack one instance. Rounding is relative to the radius and to the output of which R is a difference."""
    expansion, size_B = case.expansion(), case.size_B()
    dip_CB, g_CB = largest_dip(case, STEPS, STARTS), case.g.flatten(2).norm(dim=2)
    yield _found(f"remainder: {name}", _share(dip_CB, expansion.remainder(case.g)(case.r_B[None]), g_CB * size_B), seed)
    found_B = largest_remainder(case, STEPS, STARTS)
    yield _found(f"beta: {name}", _share(found_B, expansion.beta(case.r_B), size_B), seed)
    yield _found(f"gain: {name}", _share(largest_gain(case), expansion.gain_B, torch.ones_like(size_B)), seed)


def _share(found: Tensor, bound: Tensor, size: Tensor) -> Tensor:
    """Return found / bound; 0 if no more than rounding was found."""
    return torch.where(found > 1e-12 * size, (found - 1e-12 * size) / (bound * OUT).clamp_min(1e-300), 0.0)


def _forms(kind: type[nn.Module], case: curvature_cases.Case) -> Search:
    """Attack intermediate inequalities of leaves with hidden units, activations and norms."""

    def search(seed: int) -> Iterator[Finding]:
        for attack in form_attacks.attacks(case, seed, 2):
            name, gradient = kind.__name__, attack.forms.of_gradient(attack.instance.g[:1], attack.reach)
            rest = attack.forms.of_rest(attack.reach, attack.weight)
            yield _found(f"gradient: {name}", _climbed(attack, partial(_dip, attack, gradient)), seed)
            yield _found(f"rest: {name}", _climbed(attack, partial(_length, attack, rest)), seed)
            yield _found(f"size: {name}", _largest(attack, rest), seed)
            yield _found(f"shrink: {name}", _shrunk(attack), seed)

    return search


def _climbed(attack: Attack, share: Callable[[Tensor], Tensor]) -> Tensor:
    """Maximise over changes within the ellipsoid: (B,)."""
    one_B = torch.ones_like(attack.instance.r_B)
    start = torch.zeros(len(one_B), form_attacks.RANK, dtype=torch.float64)
    return ascend(lambda v: share(attack.change(v)).flatten(), start, one_B, STEPS, STARTS)


def _dip(attack: Attack, form: QuadraticForm, h: Tensor) -> Tensor:
    g = attack.instance.g[:1]
    rounding = 1e-10 * attack.instance.size_B() * g[0].flatten(1).norm(dim=1)
    lost = -(g * attack.rest(h)).flatten(2).sum(2) - rounding
    return lost / ((h * form.apply(h)).flatten(2).sum(2) / 2 + form.constant).mul(OUT).clamp_min(1e-300)


def _length(attack: Attack, form: QuadraticForm, h: Tensor) -> Tensor:
    rounding = 1e-10 * attack.instance.size_B() * attack._unit_scale()
    found = (attack.weight * attack.inner_rest(h)).flatten(2).norm(dim=2) - rounding
    return found / (h * form.apply(h)).flatten(2).sum(2).clamp_min(1e-300).sqrt().mul(OUT).clamp_min(1e-300)


def _largest(attack: Attack, form: QuadraticForm) -> Tensor:
    values = torch.linalg.eigvalsh(form_attacks.dense(form, attack.instance.x))
    return values[..., -1] / (form.largest * OUT).clamp_min(1e-300)


def _shrunk(attack: Attack) -> Tensor:
    """Return the largest generalised eigenvalue of the small form relative to t times the large form.

    If the large form is singular, it is regularised at the scale of the traces.
    """
    small = attack.reach * torch.rand_like(attack.reach)
    t = attack.forms.shrink(small, attack.reach)[:, None, None]
    less, more = (
        form_attacks.dense(attack.forms.of_rest(reach, attack.weight), attack.instance.x)[0]
        for reach in (small, attack.reach)
    )
    trace = more.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None]
    beyond = torch.linalg.eigvalsh(less - t * more - 1e-12 * trace * torch.eye(more.shape[-1]).to(more))[:, -1]
    return 1 + beyond / trace[:, 0, 0].clamp_min(1e-300)


def _core(score: str) -> Search:
    def search(seed: int) -> Iterator[Finding]:
        case = attention_cores.case_of(attention_cores.SCORES[score], seed)
        r = attention_cores.RADII[seed % len(attention_cores.RADII)]
        for word, climb in (("gradient", attention_cores.share_of_gradient), ("rest", attention_cores.share_of_rest)):
            yield _found(f"core, {word}: {score}", climb(case, r) / (1 + 1e-6), seed)

    return search


def _rounding(name: str) -> Search:
    """Try random points, which find rounding as well as ascent does."""

    def search(seed: int) -> Iterator[Finding]:
        dtype = served_modules.DTYPES[seed % 2]
        yield _found(f"rounding: {name}", served_modules.shares(name, dtype, seed), seed)

    return search


def _found(case: str, share: Tensor, seed: int) -> Finding:
    return Finding(case, float(share.amax()), share.numel(), {"seed": seed})
