"""Quadratic forms of remainders for every type that has them, under ascent within an ellipsoid of changes.

Forms equal dense matrices, and planted faults are detected.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
import zoo.bounds.activations as activations
import zoo.layers.norm_forms as norm_forms
from certify.shared.bake import bake
from tests.tools.cases import mostly_slow
from tests.tools.curvature_cases import CASES, FEW, HERE
from tests.tools.form_attacks import RANK, attacks, dense, dot, grazing
from tests.tools.small_models import distinct
from zoo.attention.masked import MaskedAttention
from zoo.bounds.activations import Hinge, hinge_parabola
from zoo.bounds.curvature import affine, expansion_of
from zoo.bounds.rule_table import types_where
from zoo.layers.mlp import SLL
from zoo.layers.norm_forms import NormForms, ProjectForms
from zoo.layers.norms import LayerProject, SmoothProject
from zoo.models.overview import tiny_options
from zoo.primitives import PRIMITIVES

NONE = {  # types that bend and have no forms: attention
    "DotProductAttention",
    "GPSA",
    "L2Attention",
    "LipschitzNormAttention",
    "ScaledCosineAttention",
    "WindowAttention",
}
NORMS = (nn.LayerNorm, SmoothProject, LayerProject)
each_case, few_cases = (
    pytest.mark.parametrize(("kind", "i"), cases, ids=lambda v: v.__name__ if isinstance(v, type) else str(v))
    for cases in (HERE, FEW)
)


def test_no_ascent_beats_a_projection_near_its_sphere() -> None:
    assert not any(attack.beaten() for seed in range(5) for attack in grazing(seed))


def test_which_leaves_that_bend_have_no_forms() -> None:
    """Check all modules of all models, shrunk, so that nothing is skipped silently."""
    nonlinear = set(types_where(lambda rules: rules.expansion not in (None, affine))) - set(PRIMITIVES)
    found, seen = set[str](), set[type[nn.Module]]()
    for name in distinct():
        torch.manual_seed(0)
        met = dict[type[nn.Module], tuple[nn.Module, Tensor]]()
        model: Any = bake(zoo.create_model(name, **tiny_options(name)).eval())
        options = zoo.model_options(name, **tiny_options(name))

        def look(module: nn.Module, inputs: tuple[Tensor, ...], met: Any = met) -> None:
            if type(module) in nonlinear:
                met[type(module)] = module, inputs[0]

        hooks = [module.register_forward_pre_hook(look) for module in model.modules()]
        with torch.no_grad():
            model(torch.rand(2, options["in_chans"], options["img_size"], options["img_size"], dtype=torch.float64))
        for hook in hooks:
            hook.remove()
        for module, x in met.values():
            x = x.unsqueeze(1) if x.ndim == 2 and isinstance(module, NORMS) else x  # a pooled token
            if expansion_of(module)(x).forms is None:
                found.add(type(module).__name__)
        seen |= met.keys()
    assert found == NONE
    masked = {MaskedAttention}  # its parts have them: tests/zoo/attention/test_forms.py
    assert nonlinear - seen - masked <= set(CASES)  # types without a model are attacked below, and must have forms


@few_cases
def test_no_ascent_beats_a_form(kind: type[nn.Module], i: int) -> None:
    assert not any(attack.beaten() for attack in attacks(CASES[kind][i], 0))


@each_case
def test_the_remainder_is_spread_and_collected(kind: type[nn.Module], i: int) -> None:
    """R = B r, and B^T is the transpose of B."""
    for attack in attacks(CASES[kind][i], 1, 2):
        h = attack.change(torch.randn(3 * len(attack.instance.x), RANK, dtype=torch.float64))
        r, wanted = attack.inner_rest(h), attack.rest(h)
        torch.testing.assert_close(attack.forms.spread(r), wanted, rtol=1e-6, atol=1e-9)
        g, v = torch.randn_like(wanted), torch.randn_like(r)
        torch.testing.assert_close(dot(g, attack.forms.spread(v)), dot(attack.forms.collect(g), v))


@each_case
def test_forms_are_symmetric_and_never_above_their_largest(kind: type[nn.Module], i: int) -> None:
    for attack in attacks(CASES[kind][i], 2, 2):
        signed, absolute = attack.forms.signed(attack.instance.g, attack.reach)
        for form in (
            attack.forms.of_gradient(attack.instance.g, attack.reach),
            attack.forms.of_rest(attack.reach, attack.weight),
            absolute,
        ):
            c = dense(form, attack.instance.x)
            size = c.abs().amax((-2, -1)).clamp_min(1e-300)
            assert ((c - c.mT).abs().amax((-2, -1)) <= 1e-12 * size).all()
            values = torch.linalg.eigvalsh((c + c.mT) / 2)
            assert (values[..., 0] >= -1e-12 * size).all()
            assert (values[..., -1] <= form.largest * (1 + 1e-12)).all()
            assert (torch.as_tensor(form.constant) >= 0).all()
        c, most = dense(signed, attack.instance.x), dense(absolute, attack.instance.x)
        for between in (most - c, most + c):
            assert (torch.linalg.eigvalsh(between)[..., 0] >= -1e-12 * most.abs().amax((-2, -1))).all()
        assert (torch.linalg.matrix_norm(c, 2) <= signed.largest * (1 + 1e-12)).all()


@few_cases
def test_shrink_says_how_forms_shrink(kind: type[nn.Module], i: int) -> None:
    for attack in attacks(CASES[kind][i], 3, 2):
        for factor in (1.0, 0.9, 0.5, 1e-3, 0.0):
            part = factor + (1 - factor) * torch.rand_like(attack.reach) * (factor == 0.5)
            small, large = attack.reach * part, attack.reach
            t = attack.forms.shrink(small, large)
            assert (t <= 1).all()
            less, more = (
                dense(attack.forms.of_rest(reach, attack.weight), attack.instance.x)[0] for reach in (small, large)
            )
            gap = torch.linalg.eigvalsh(t[:, None, None] * more - less)[:, 0]
            assert (gap >= -1e-12 * more.abs().amax((-2, -1))).all()
        assert (attack.forms.shrink(0 * attack.reach, attack.reach) == 0).all()


@each_case
def test_extreme_reaches_have_an_answer(kind: type[nn.Module], i: int) -> None:
    """Forms are finite; their cost may be infinite but never NaN."""
    for attack in attacks(CASES[kind][i], 4, 2):
        attack.instance.g[0, 0] = 0
        far = torch.full_like(attack.reach, torch.inf)
        some = torch.where(torch.rand_like(attack.reach) < 0.5, far, attack.reach)
        for reach in (torch.zeros_like(far), torch.full_like(far, 1e-12), torch.full_like(far, 1e-200), some, far):
            gradient, rest = (
                attack.forms.of_gradient(attack.instance.g, reach),
                attack.forms.of_rest(reach, attack.weight),
            )
            signed = attack.forms.signed(attack.instance.g, reach)
            for form in (gradient, rest, *signed):
                assert not form.largest.isnan().any()
                assert not torch.as_tensor(form.constant).isnan().any()
                v = torch.randn(len(form.largest), *attack.instance.x.shape, dtype=torch.float64)
                assert form.apply(v).isfinite().all()
            for form in (gradient, signed.form):
                assert (torch.as_tensor(form.constant).expand_as(form.largest)[0, 0] == 0).all()
            t = attack.forms.shrink(reach, far)
            assert ((t >= 0) & (t <= 1)).all()


def no_constant(v: Tensor, k: Tensor, reach: Tensor) -> tuple[Tensor, Tensor]:
    c, s = hinge_parabola(v, k, reach)
    return c, 0 * s


def at_the_clean_point(forms: NormForms, reach: norm_forms.TokenRange) -> norm_forms.Factors:
    found = factors(forms, reach)
    half = torch.full_like(found.a, 0.5)
    return replace(found, a=0 * half, change=1e-9 * half, alpha=(half, half), beta=(half, half))


kink, factors, chord, turned = Hinge._kink, NormForms._factors, Hinge.chord, NormForms._turned
# a fault: (its type, the replaced attribute, the replacement)
FAULTS: dict[str, tuple[type[nn.Module], object, str, Callable[..., object]]] = {
    "constant forgotten": (nn.ReLU, activations, "hinge_parabola", no_constant),
    "constant forgotten of hidden units": (SLL, activations, "hinge_parabola", no_constant),
    "the other kink": (nn.ReLU, Hinge, "_kink", lambda self, z, w: kink(self, z, -w)),
    "a chord too flat": (nn.ReLU, Hinge, "chord", lambda self, z, reach: 0.9 * chord(self, z, reach)),
    "the norm at the clean point": (SmoothProject, NormForms, "_factors", at_the_clean_point),
    "the norm of a projection at the clean point": (LayerProject, NormForms, "_factors", at_the_clean_point),
    "a rest too small": (nn.LayerNorm, NormForms, "_turned", lambda self, reach: 0.3 * turned(self, reach)),
    "nothing comes out of the sphere": (
        LayerProject, ProjectForms, "_comes_out", lambda self, reach: torch.zeros_like(reach.size).bool()
    ),
    "nothing goes through the sphere": (LayerProject, ProjectForms, "_through", ProjectForms._curved),
}  # fmt: skip


@pytest.mark.parametrize("fault", mostly_slow(FAULTS, *(FAULTS.keys() - {"constant forgotten of hidden units"})))
def test_a_planted_fault_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, where, name, by = FAULTS[fault]
    monkeypatch.setattr(where, name, by)
    many = [attack for case in CASES[kind] for attack in attacks(case, 0, 10)]
    assert any(attack.beaten() for attack in [*many, *(grazing(0) if kind is LayerProject else ())])
