"""An overview of the zoo: sizes, cost and provability of every model, and the tree of its layers.

Nothing here allocates the weights of a full-size model: sizes and cost come from the `meta` device, and the rules are
tried on the same parts at a tiny size.

Letters: B images, C channels, H x W pixels.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from fnmatch import fnmatchcase
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from rich.tree import Tree
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from certizoo import UserError
from certizoo.nearest import choices
from zoo.bounds.curvature import trunk_of
from zoo.bounds.first_order import classifier_of
from zoo.bounds.rule_table import NoRule, types_where
from zoo.layers.fold import folded
from zoo.models.catalog import Options
from zoo.models.factory import attention_name, create_model, list_models, model_options
from zoo.weights.table import entries

MEASURED = Path(__file__).with_name("summaries.json")
NUMBERS = ("M parameters", "GMACs", "tokens")
COLUMNS = ("name", "attention", "backbone", *NUMBERS, "image", "lofast", "adjoint", "weights")
COUNTED = (
    "GMACs: 10^9 multiply-adds of all matrix products and convolutions for one image, those inside the attention "
    "included (model cards that leave out fused attention show less: 16.9 instead of 17.6 for a ViT-B/16).\n"
    "tokens: after the patch embedding, class token included; Swin: in its first stage.   "
    "lofast, adjoint: yes, if every part has a proven rule; `python -m zoo show NAME` says what is missing.\n"
    "weights: certified accuracy (per cent, L2) of those that `create_model(NAME, pretrained=True)` gives."
)


@dataclass(frozen=True)
class ModelSummary:
    """One row of the overview. `lofast` and `adjoint` are '' where the certificate applies, else the reason why not."""

    name: str
    attention: str
    backbone: str
    parameters: int
    macs: int
    tokens: int | None
    image: str
    lofast: str
    adjoint: str
    weights: str = ""  # a short summary of the published weights' certificates; '' if there are none

    def cells(self) -> tuple[str, ...]:
        """Return the cells for people, one for each of COLUMNS."""
        provable = ["-" if reason else "yes" for reason in (self.lofast, self.adjoint)]
        sizes = (
            f"{self.parameters / 1e6:.2f}",
            f"{self.macs / 1e9:.3g}",
            "-" if self.tokens is None else str(self.tokens),
        )
        return self.name, self.attention, self.backbone, *sizes, self.image, *provable, self.weights or "-"

    def record(self) -> dict[str, Any]:
        """Return the record for CSV and JSON."""
        found = asdict(self)
        for method in RULES:
            found |= {method: not found[method], f"{method}_reason": found[method]}
        return found


FIELDS = {field.name for field in fields(ModelSummary)}


def summarize(name: str, **overrides: Any) -> ModelSummary:
    """Summarise one model for `python -m zoo`. Raises UserError as `create_model` does."""
    options = model_options(name, **overrides)
    model = on_meta(name, **overrides)
    with FlopCounterMode(display=False) as counter:
        _forward(model, options)
    return ModelSummary(
        name=name,
        attention=attention_name(name, **overrides) if "attention" in options else "-",
        backbone="convit" if options.get("gpsa_layers") else str(options["backbone"]),
        parameters=sum(p.numel() for p in model.parameters()),
        macs=counter.get_total_flops() // 2,
        tokens=_tokens(model),
        image="x".join(str(n) for n in (options["in_chans"], options["img_size"], options["img_size"])),
        lofast=lofast_refusal(name, **overrides),
        adjoint=rules_refusal(name, "adjoint", **overrides),
        weights=_headline(name),
    )


def _headline(name: str) -> str:
    published = entries()
    return published[name].headline if name in published else ""


def summary(name: str) -> ModelSummary:
    """Return the summary of a model of the catalogue from summaries.json, or measure one that the file lacks.

    Measuring all of them takes minutes. The file is the output of `python -m zoo --measure --format json`.
    """
    found = _measured().get(name)
    if found is None:
        return summarize(name)
    return replace(found, weights=_headline(name))


@cache
def _measured() -> dict[str, ModelSummary]:
    return {record["name"]: _summary_of(record) for record in json.loads(MEASURED.read_text())}


def _summary_of(record: dict[str, Any]) -> ModelSummary:
    return ModelSummary(**{key: record.get(f"{key}_reason", value) for key, value in record.items() if key in FIELDS})


def matching(pattern: str) -> list[str]:
    """Return the names that match a pattern such as 'l2_*'. Raises UserError if none does."""
    names = list_models()
    if found := [name for name in names if fnmatchcase(name, pattern)]:
        return found
    raise UserError(f"no model fits {pattern!r}; {choices(pattern.strip('*'), names, 'python -m zoo')}")


def table(rows: Iterable[ModelSummary]) -> Table:
    """Return the overview as a table for people; COUNTED explains its figures."""
    result = Table(caption=COUNTED, caption_justify="left")
    for column in COLUMNS:
        result.add_column(column, justify="right" if column in NUMBERS else "left")
    for row in rows:
        result.add_row(*row.cells())
    return result


# sizes and cost ------------------------------------------------------------------------------------------------------


def on_meta(name: str, **overrides: Any) -> nn.Module:
    """Return the model as it is served (eval mode, parametrisations folded), without memory for its weights."""
    with torch.device("meta"):
        return folded(create_model(name, **overrides))


def _forward(model: Any, options: Options) -> None:
    """Run all tokens through all blocks, as model cards count them; `model(x)` skips what no logit needs."""
    size = options["img_size"]
    with torch.no_grad():
        model.forward_head(model.forward_features(torch.empty(1, options["in_chans"], size, size, device="meta")))


def _tokens(model: nn.Module) -> int | None:
    """Return the number of tokens, or None for models without patches."""
    patches = getattr(getattr(model, "patch_embed", None), "num_patches", None)
    return None if patches is None else patches + (getattr(model, "cls_token", None) is not None)


# provability ---------------------------------------------------------------------------------------------------------


def tiny_options(name: str) -> Options:
    """Return overrides that make any model tiny and keep its parts: all kinds of blocks, norms and attention."""
    options = model_options(name)
    return {"num_classes": 5} | TINY[options["backbone"]](options)


def _tiny_vit(options: Options) -> Options:
    """Use 3 x 3 patches and two layers (ConViT: one with gated positions, one without)."""
    tiny = {"img_size": 12, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 3}
    stem: Any = options["stem"]
    if stem is not None:
        stem = (8,) if isinstance(stem[0], int) else ((8, 4, 2, 1),)
    return tiny | {"gpsa_layers": min(options["gpsa_layers"], 1), "stem": stem}


def _tiny_text(options: Options) -> Options:
    """Use sentences of 12 tokens."""
    return {"img_size": 12, "embed_dim": 12 * options["in_chans"], "depth": 2, "num_heads": 3, "vocabulary": 16}


def _tiny_swin(options: Options) -> Options:
    """Use two stages: 4 windows of 3 x 3 patches, plain and shifted, then one window that is the whole grid."""
    return {
        "img_size": 12,
        "patch_size": 2,
        "window_size": 3,
        "embed_dim": 12,
        "depths": (2, 1),
        "num_heads": (2, 3),
    }


def _tiny_convnet(options: Options) -> Options:
    """Give every convolution an eighth of its channels, on the smallest image that all of them can reduce."""
    layers = tuple((channels // 8, *rest) for channels, *rest in options["layers"])
    return {"img_size": 22, "layers": layers, "hidden": (8,) * len(options["hidden"])}


TINY: dict[str, Callable[[Options], Options]] = {
    "vit": _tiny_vit,
    "text": _tiny_text,
    "swin": _tiny_swin,
    "convnet": _tiny_convnet,
}


def lofast_refusal(name: str, **overrides: Any) -> str:
    """Return why LoFAST does not apply, or ''; see `rules_refusal`."""
    return rules_refusal(name, "lofast", **overrides)


def rules_refusal(name: str, method: str, **overrides: Any) -> str:
    """Return '' if the rules of a method, 'lofast' or 'adjoint', cover the model, else the reason why not.

    The rules are actually run, on the same parts at a tiny size.
    """
    options = overrides | tiny_options(name)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        model = folded(create_model(name, **options)).double().requires_grad_(False)
    size = options["img_size"]
    try:
        x = torch.full((1, model_options(name, **options)["in_chans"], size, size), 0.5, dtype=torch.float64)
        RULES[method](model, x)
    except NoRule as error:
        return str(error)
    return ""


def _lofast_rules(model: nn.Module, x_BCHW: Tensor) -> None:
    trunk, _ = classifier_of(model)
    trunk(x_BCHW)


def _adjoint_rules(model: nn.Module, x_BCHW: Tensor) -> None:
    for layer, expand in trunk_of(model)[0]:
        layer(x_BCHW)
        x_BCHW = expand(x_BCHW).y


RULES: dict[str, Callable[[nn.Module, Tensor], None]] = {"lofast": _lofast_rules, "adjoint": _adjoint_rules}


# the tree of layers --------------------------------------------------------------------------------------------------


def layer_tree(name: str, **overrides: Any) -> Tree:
    """Return every module with its type, options, parameters and output shape for one image; equal neighbours once."""
    options = model_options(name, **overrides)
    model = on_meta(name, **overrides)
    shapes = _output_shapes(model, options)
    root = Tree(_label(name, model, shapes), highlight=True)
    _grow(root, model, shapes)
    return root


def rule_table(name: str, **overrides: Any) -> Table:
    """Return every type of module in the model, and whether it has a proven rule of its own."""
    model = on_meta(name, **overrides)
    parts = [module for module in model.modules() if module is not model]
    proved = set(types_where(lambda rules: rules.rule or rules.chain))
    weights = Counter[type[nn.Module]]()
    for module in parts:
        weights[type(module)] += sum(p.numel() for p in module.parameters(recurse=False))
    caption = "A module without a rule of its own may be covered by that of the module around it."
    result = Table("module type", "modules", "own parameters", "rule", caption=caption, caption_justify="left")
    for kind, count in Counter(type(module) for module in parts).items():
        rule = "yes" if kind in proved else "-"
        result.add_row(f"{kind.__module__}.{kind.__qualname__}", str(count), f"{weights[kind]:,}", rule)
    return result


def _output_shapes(model: nn.Module, options: Options) -> dict[nn.Module, str]:
    """Return the output shapes of the modules that return one tensor."""
    shapes: dict[nn.Module, str] = {}

    def note(module: nn.Module, _inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            shapes[module] = str(tuple(output.shape))

    hooks = [module.register_forward_hook(note) for module in model.modules()]
    _forward(model, options)
    for hook in hooks:
        hook.remove()
    return shapes


def _grow(tree: Tree, module: nn.Module, shapes: dict[nn.Module, str]) -> None:
    children = list(_collapsed(module))
    if children:  # the options of a leaf already show its weights
        for key, weight in module.named_parameters(recurse=False):
            tree.add(f"{key} {tuple(weight.shape)}")
    for key, child in children:
        _grow(tree.add(_label(key, child, shapes)), child, shapes)


def _collapsed(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the children; of numbered neighbours with one structure, only the first: '0-11 (12x)'."""
    for _, group in groupby(module.named_children(), key=_structure):
        (first, child), *others = group
        yield (f"{first}-{others[-1][0]} ({len(others) + 1}x)" if others else first), child


def _structure(item: tuple[str, nn.Module]) -> tuple[str, str, list[torch.Size]]:
    """Return what neighbours must share to be shown once; the rate of stochastic depth grows from block to block."""
    key, module = item
    text = re.sub(r"drop_prob=[\d.]+", "", repr(module))
    return "" if key.isdigit() else key, text, [p.shape for p in module.parameters()]


def _label(key: str, module: nn.Module, shapes: dict[nn.Module, str]) -> str:
    count = sum(p.numel() for p in module.parameters())
    shape = f" -> {shapes[module]}" if module in shapes else ""
    return f"{key}: {type(module).__name__}({module.extra_repr()})" + (f" {count:,}" if count else "") + shape
