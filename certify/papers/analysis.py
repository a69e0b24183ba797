"""The analyses of the papers: Jacobians of the blocks (CoViT), bounds of an attention layer (LoFAST, SpecFormer).

Every function returns a table with one number per row; `certify.papers.figures` draws them. Nothing here enters a
certificate.
"""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
from torch import Tensor, nn

import zoo
from certify.papers import figures, jacobian, paper_bounds
from certify.papers.ascent import largest, largest_change
from certify.rows.images import image_list
from certify.rows.records import results, write_csv, write_json
from certify.shared.bake import bake
from certizoo import shards
from certizoo.config.schema import Count, MinLen, Positive, Section
from certizoo.files import write_whole
from certizoo.progress import Progress, counting, silent
from zoo.attention.dot_product import DotProductAttention
from zoo.attention.l2 import L2Attention
from zoo.attention.lipschitz_norm import LipschitzNormAttention
from zoo.attention.scsa import ScaledCosineAttention
from zoo.attention.softmax.module import QKVAttention
from zoo.bounds.contracts import Bound
from zoo.bounds.first_order import residual_layer_of
from zoo.bounds.rule_table import NoRule

FOLDER = "analysis"
PGD = "PGD (lower bound)"
LOFAST, LOFAST_LOCAL = "lofast", "lofast_local"
UNSOUND = " as printed (unsound)"
PAPER_BOUNDS: dict[type[nn.Module], dict[str, Callable[[Any, Tensor], Bound]]] = {
    DotProductAttention: {
        "Theorem 1 of LoFAST": paper_bounds.lofast_theorem_1,
        "naive (eq. 12 for zeta)": paper_bounds.naive,
        "SpecFormer, Theorem 4.3": paper_bounds.specformer,
    },
    L2Attention: {"eq. 40, corrected": paper_bounds.l2_eq_40, f"eq. 40{UNSOUND}": paper_bounds.l2_eq_40_as_printed},
    LipschitzNormAttention: {f"eq. 41{UNSOUND}": paper_bounds.ln_eq_41_as_printed},
    ScaledCosineAttention: {"eq. 42": paper_bounds.scsa_eq_42},
}
TABLE_3 = {PGD: PGD, LOFAST: "LoFAST upper bound", "SpecFormer, Theorem 4.3": "SpecFormer upper bound"}
SCORE_NORM_LIMIT = 2**22  # entries of the (N^2, N D) matrix of Lemma 2
SIZES, FACTORS = (0.25, 0.5, 1.0, 2.0), (0.0, 0.25, 0.5, 1.0, 1.5, 2.0)
Step = Callable[[], None]


Radii = Annotated[tuple[Positive, ...], MinLen(1)]


@dataclass(frozen=True)
class Settings(Section):
    """The keys of configs/analyse.yaml. eps are radii at the input of the first attention layer."""

    images: Count = 50
    attention_images: Count = 5
    eps: Radii = (0.01, 0.03, 0.05, 0.07, 0.09, 0.1)
    input_scales: Radii = (0.25, 1.0, 4.0)
    ablation_eps: Positive = 0.1
    samples: Count = 10


def jacobians(parts: Sequence[jacobian.Part], step: Step = lambda: None) -> pd.DataFrame:
    """Return sigma_max of every block, and of its branch F = block - identity, image by image."""
    records = []
    for part in parts:
        for of, f in (("block", part.module), ("branch", jacobian.branch(part.module))):
            sigma_B, measure = jacobian.measure(f, part.x)
            records += [
                {"block": part.name, "of": of, "image": i, "sigma_max": sigma, "measure": measure}
                for i, sigma in enumerate(sigma_B.tolist())
            ]
        step()
    return pd.DataFrame(records)


def attention_of(baked: nn.Module, blocks: Sequence[jacobian.Part], images_BCHW: Tensor) -> jacobian.Part:
    """Return the attention of the first block, with its input (its windows, for a Swin)."""
    (part,) = jacobian.parts_of(baked, images_BCHW, [f"{blocks[0].name}.attn"])
    return part._replace(x=part.x[: len(images_BCHW)])


def upper_bounds(module: nn.Module, x_BND: Tensor) -> Iterator[tuple[str, Bound]]:
    """Yield every known bound of the change of X + F(X), by name: those of our rules, if any, then the papers'."""
    try:
        ours = residual_layer_of(module)(x_BND)[1]
        sharper = residual_layer_of(module, local=True)(x_BND)[1]
    except NoRule:
        pass
    else:
        yield LOFAST, ours
        yield LOFAST_LOCAL, sharper
    for name, bound in PAPER_BOUNDS.get(type(module), {}).items():
        yield name, bound(module, x_BND)


def bounds(
    module: nn.Module,
    x_BND: Tensor,
    eps_grid: Sequence[float],
    scales: Sequence[float] = (1.0,),
    step: Step = lambda: None,
) -> pd.DataFrame:
    """Return the largest change of X + F(X) over ||X' - X||_F <= eps, by the upper bounds and by ascent.

    These are Figures 1 (right) and 4 and Table 3 of LoFAST.
    """
    records = []
    for scale in scales:
        x = scale * x_BND
        length_B = x.flatten(1).norm(dim=1)
        with torch.no_grad():
            known = dict(upper_bounds(module, x))
        for eps in eps_grid:
            eps_B = torch.full((len(x),), eps, dtype=x.dtype, device=x.device)
            values = {PGD: largest_change(lambda z: z + module(z), x, eps_B)}
            values |= {name: bound(eps_B) for name, bound in known.items()}
            records += [
                {"input_scale": scale, "input_norm": length, "eps": eps, "bound": name, "image": i, "change": change}
                for name, change_B in values.items()
                for i, (length, change) in enumerate(zip(length_B.tolist(), change_B.tolist(), strict=True))
            ]
            step()
    return pd.DataFrame(records)


def head_parts(
    module: DotProductAttention, x_BND: Tensor, eps_grid: Sequence[float], step: Step = lambda: None
) -> pd.DataFrame:
    """Return Delta_21 = ||P(X') - P(X)||_F and Delta_22 = ||X' M|| of the first head.

    Section 5.1 of LoFAST: Figure 1.
    """
    heads = paper_bounds.Heads(module, x_BND)
    m_DD = heads.m_HDD[0]
    slopes = {"delta_21^(2), xi (eq. 26)": heads.xi()}
    if x_BND.shape[1] ** 3 * x_BND.shape[2] <= SCORE_NORM_LIMIT:
        slopes["delta_21^(1), ||M(X)|| (Lemma 2)"] = paper_bounds.score_norm(heads)
    norm_x_B = torch.linalg.matrix_norm(x_BND, 2)
    records = []
    for eps in eps_grid:
        eps_B = torch.full((len(x_BND),), eps, dtype=x_BND.dtype, device=x_BND.device)
        p_change = largest_change(lambda z: heads.attend(z)[:, 0], x_BND, eps_B)
        values_found = largest(lambda z: torch.linalg.matrix_norm(z @ m_DD, 2), x_BND, eps_B)
        table = [("delta_21", PGD, p_change), ("delta_22", PGD, values_found)]
        table += [("delta_21", name, heads.change_of_p(eps_B, slope)[:, 0]) for name, slope in slopes.items()]
        table += [
            ("delta_22", "delta_22^(1) (eq. 18)", heads.values(eps_B)[:, 0]),
            ("delta_22", "delta_22^(2) = ||M|| (||X|| + eps)", heads.norm_m_H[0] * (norm_x_B + eps_B)),
        ]
        records += [
            {"of": of, "eps": eps, "bound": name, "image": i, "value": value}
            for of, name, value_B in table
            for i, value in enumerate(value_B.tolist())
        ]
        step()
    return pd.DataFrame(records)


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """Return those of W_Q, W_K, W_V, W_O that the attention has, as views of the parameters."""
    content = getattr(module, "content", module)
    if isinstance(content, QKVAttention):
        return dict(zip(("W_Q", "W_K", "W_V"), content.qkv.weight.chunk(3), strict=True)) | {"W_O": content.proj.weight}
    if isinstance(content, L2Attention):
        parts = {"W_Q": content.q, "W_K": content.k, "W_V": content.v, "W_O": content.proj}
        return {name: part.weight for name, part in parts.items() if part is not None}
    return {}


@torch.no_grad()
def ablation(
    module: nn.Module, x_1ND: Tensor, eps: float, samples: int = 10, step: Step = lambda: None
) -> pd.DataFrame:
    """Return the lofast bound at eps after a change of one of W_Q, W_K, W_V, W_O, X, relative to the unchanged one.

    perturbed   W + size ||W||_F E, E Gaussian with ||E||_F = 1, `samples` times: Figure 3 of LoFAST
    scaled      factor W
    """
    generator = torch.Generator().manual_seed(0)
    eps_1 = torch.full((1,), eps, dtype=x_1ND.dtype, device=x_1ND.device)
    whole = float(residual_layer_of(module)(x_1ND)[1](eps_1))
    records = []
    for name in (*weights_of(module), "X"):
        trials = [("perturbed", size, i) for size in SIZES for i in range(samples)]
        for kind, size, sample in trials + [("scaled", factor, 0) for factor in FACTORS]:
            changed, x = copy.deepcopy(module), x_1ND.clone()
            target = (weights_of(changed) | {"X": x})[name]
            target.copy_(_changed(target, kind, size, generator))
            value = float(residual_layer_of(changed)(x)[1](eps_1))
            record = {"part": name, "change": kind, "size": size, "sample": sample, "bound": value}
            records.append(record | {"relative": value / whole})
        step()
    return pd.DataFrame(records)


def _changed(weight: Tensor, kind: str, size: float, generator: torch.Generator) -> Tensor:
    if kind == "scaled":
        return size * weight
    noise = torch.randn(weight.shape, generator=generator, dtype=weight.dtype).to(weight)
    return weight + size * weight.norm() * noise / noise.norm()


def table_3(bounds_: pd.DataFrame) -> pd.DataFrame:
    """Return Table 3 of LoFAST: means over the images at the model's own input, by method and eps."""
    own = bounds_[bounds_["input_scale"] == 1]
    mean = own.pivot_table(index="bound", columns="eps", values="change", sort=False, dropna=False)
    return mean.rename(index=TABLE_3).rename(columns=lambda eps: f"eps={eps:g}")


def text(table: pd.DataFrame) -> str:
    """Return the table for the terminal; a bound whose paper's condition fails is NaN."""
    return table.to_string(float_format=lambda value: f"{value:.4g}", index_names=False)


def product_bound(model: nn.Module, images_BCHW: Tensor) -> float | None:
    """Return CertViT's product of constants, or None if a part has no rule."""
    try:
        return float(paper_bounds.product(model, images_BCHW))
    except NoRule:
        return None


def run(
    handover: Path,
    data: shards.DataConfig,
    settings: Settings,
    out: Path,
    progress: Progress = silent,
) -> pd.DataFrame:
    """Write all tables and figures of one hand-over into OUT/analysis; return Table 3.

    `progress(done, total)` is called after every step. Raises UserError for a model without transformer blocks, or if
    another process is at work in OUT/analysis.
    """
    with results(out / FOLDER):
        return _run(handover, data, settings, out / FOLDER, progress)


def _run(handover: Path, data: shards.DataConfig, settings: Settings, folder: Path, progress: Progress) -> pd.DataFrame:
    model, config = zoo.handover.load(handover)
    baked = bake(model)
    images = _images(data, settings.images)
    parts = jacobian.blocks_of(baked, images)
    attention = attention_of(baked, parts, images[: settings.attention_images])
    dot_product = type(attention.module) is DotProductAttention
    scales = tuple(dict.fromkeys((*settings.input_scales, 1.0)))
    names = (*weights_of(attention.module), "X")
    step = counting(progress, len(parts) + len(settings.eps) * (len(scales) + dot_product) + len(names))
    sigma = jacobians(parts, step)
    write_csv(folder / "sigma_max.csv", sigma)
    figures.violins(sigma, folder / "sigma_max.png")
    changes = bounds(attention.module, attention.x, settings.eps, sorted(scales), step)
    write_csv(folder / "bounds.csv", changes)
    figures.against_eps(changes, attention.name, folder / "bounds.png")
    if isinstance(attention.module, DotProductAttention):
        heads = head_parts(attention.module, attention.x, settings.eps, step)
        write_csv(folder / "head_parts.csv", heads)
        figures.head_parts(heads, attention.name, folder / "head_parts.png")
    product = product_bound(model, images)
    _ablate(attention, settings, folder, step)
    table = table_3(changes)
    write_csv(folder / "table_3.csv", table.reset_index())
    write_whole(folder / "table_3.txt", text(table) + "\n")
    note = {
        "model": config["model"]["name"],
        "attention": attention.name,
        "settings": asdict(settings),
        "product_of_lipschitz_constants": "infinite" if product == math.inf else product,
    }
    write_json(folder / "analysis.json", note)
    return table


def _ablate(attention: jacobian.Part, settings: Settings, folder: Path, step: Step) -> None:
    """Write the ablation, unless there is no rule whose bound could change."""
    try:
        table = ablation(attention.module, attention.x[:1], settings.ablation_eps, settings.samples, step)
    except NoRule:
        return
    write_csv(folder / "ablation.csv", table)
    figures.ablation(table, settings.ablation_eps, folder / "ablation.png")


def _images(data: shards.DataConfig, count: int) -> Tensor:
    return torch.cat([images for _, images, _ in image_list(data, count, count).batches()])
