"""A certificate explained layer by layer: `certify.explain(model, images)`.

    norm     the largest stretch of the layer at an image (||J||, or the first-order rule at a small radius): the median
    share    its part of the loss at the certified radius (method adjoint), or its growth of the radius (lofast)

A model with operations that have no rule gets the list of all of them, with the line of code of each.

Letters: B images.
"""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from certify.adjoint.adjoint import Adjoint
from certify.api import outside_inference_mode, radius_of
from certify.graph.model import NotCaptured, with_rules
from certify.methods import AUTO, choices
from certify.methods.lofast import LoFAST
from certify.shared.breakdown import names
from certify.shared.certificate import Breakdown, Certifier, Explained
from certizoo.attacks.loop import probing
from certizoo.memory import peak_memory
from zoo.bounds.contracts import Layer
from zoo.bounds.first_order import parts_of
from zoo.bounds.rule_table import NoRule
from zoo.primitives.folded import Folded

SMALL = 1e-6  # radius at which a first-order rule is its slope
FIRST, SECOND = ("lofast", "lofast_local", "best"), ("adjoint", "image", "taylor")
ADD = "add a rule for the module around it: docs, 'My own model'"


@dataclass(frozen=True)
class Row:
    """One layer: its name, the kinds of modules in it, what is known of it, its norm, and its share."""

    name: str
    kind: str
    rules: str
    norm: float | None = None
    share: float | None = None


@dataclass(frozen=True)
class Explanation:
    """All layers of a model, the method that takes it (None: none does), and the certified radii of the images.

    `seconds` an image are those of the processors; `memory` is the most that the process has had, in MiB.
    """

    rows: tuple[Row, ...]
    method: str | None
    quantity: str
    radius_B: Tensor
    methods: tuple[str, ...] = ()  # all that take it
    auto: str = ""  # the one that `auto` means
    seconds: float = 0.0
    memory: int = 0

    @property
    def accepted(self) -> bool:
        return self.method is not None

    def __str__(self) -> str:
        head = ["layer", "kind", "rules", "norm", self.quantity]
        lines = [[row.name, row.kind, row.rules, _number(row.norm), _number(row.share)] for row in self.rows]
        if not self.accepted:
            head, lines = ["operation", "where", "what is missing"], [line[:3] for line in lines]
        widths = [max(len(line[k]) for line in (head, *lines)) for k in range(len(head))]
        table = "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in (head, *lines))
        return f"{table}\n{self.verdict()}"

    def verdict(self) -> str:
        """Return one line: the method and the radii, or that the model is refused."""
        if self.method is None:
            return f"refused: {len(self.rows)} operations have no rule; {ADD}"
        radii = f"median {float(self.radius_B.median()):.3g}, largest {float(self.radius_B.max()):.3g}"
        found = f"accepted by {self.method}; certified L2 radii of {len(self.radius_B)} images: {radii}"
        cost = f"{self.seconds:.2g} s of processor time an image, {self.memory} MiB at most"
        return f"{found}\n{cost}; methods: {', '.join(self.methods)}; auto is {self.auto}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


@outside_inference_mode
def explain(
    model: nn.Module, images_BCHW: Tensor, labels_B: Tensor | None = None, nonce: str | None = None
) -> Explanation:
    """Return a table of the model's layers: rule or what is missing, norm, and share of the loss.

    Args:
        model: any module that maps images to logits.
        images_BCHW: (B, C, H, W) in [0,1]; norms and shares depend on them.
        labels_B: (B,); the model's own answers unless given.
        nonce: see `certify.certify`.
    """
    if labels_B is None:
        labels_B = _answers(model, images_BCHW)
    try:
        given = with_rules(model, images_BCHW, labels_B)
    except NotCaptured as refused:
        rows = tuple(Row(fault.operation, fault.where, fault.reason) for fault in refused.faults)
        return Explanation(rows, None, "share", torch.zeros(len(labels_B)))
    start = time.process_time()
    try:
        made: Certifier = Adjoint(given, nonce)
        method, second = "adjoint", ""
    except NoRule as lacking:
        made, method, second = LoFAST(given), "lofast", f"first order only: {_reason(lacking)}"
    analysis = made.analyse(images_BCHW, labels_B)
    radius_B = radius_of(analysis)
    seconds = (time.process_time() - start) / max(1, len(labels_B))
    assert isinstance(analysis, Explained)
    breakdown = analysis.breakdown(torch.where(radius_B > 0, radius_B, SMALL))
    rows = tuple(_rows(made, images_BCHW, breakdown, second))
    methods = FIRST if second else (*FIRST, *SECOND)
    auto = next(name for name in choices(AUTO, given, tuple(images_BCHW.shape[1:])) if name in methods)
    return Explanation(rows, method, breakdown.quantity, radius_B, methods, auto, seconds, peak_memory())


def _answers(model: nn.Module, images_BCHW: Tensor) -> Tensor:
    weight = next(model.parameters(), torch.empty(0))
    with probing(model), torch.no_grad():  # restores the mode of every part
        labels: Tensor = model(images_BCHW.to(weight)).argmax(-1)
    return labels


def _reason(lacking: NoRule) -> str:
    return f"{lacking.module_type.__name__} has no second-order rule"


def _rows(made: Certifier, images_BCHW: Tensor, breakdown: Breakdown, second: str) -> list[Row]:
    """Return a row for every step, in the order of the chain, and one for the first order where losses are shared."""
    layers: list[Layer] = [layer for layer, _ in made.nodes] if isinstance(made, Adjoint) else list(_steps(made))
    rows, x = list[Row](), images_BCHW.to(next(made.baked.parameters())).double()
    costs = {name: float(cost_B.nanmedian()) for name, cost_B in breakdown.costs.items()}
    for k, (layer, name) in enumerate(zip(layers, names(made.baked, layers), strict=True)):
        y, bound = layer(x)
        ones_B = torch.ones(len(x)).to(x)
        slope_B = made.nodes[k][1](x).gain_B if isinstance(made, Adjoint) else bound(SMALL * ones_B) / SMALL
        known = second or "first and second order"
        rows.append(Row(_plain(name), _kinds(layer), known, float(slope_B.median()), costs.get(name)))
        x = y
    rest = [Row(name, "", "", None, cost) for name, cost in costs.items() if name not in names(made.baked, layers)]
    return rest + rows


def _steps(made: Certifier) -> Sequence[Layer]:
    assert isinstance(made, LoFAST)
    return made.steps


def _plain(name: str) -> str:
    """Return the name without what capture adds to the names of a model."""
    return re.sub(r"[^ ,()]*\.branches\.\d+\.", "", name.removeprefix("parts.")).replace("/", ".")


def _kinds(layer: Layer) -> str:
    parts = [kind for part in parts_of(layer) for kind in _kinds_of(part)]
    return ", ".join(dict.fromkeys(part for part in parts if part != "Identity")) or type(layer).__name__


def _kinds_of(part: nn.Module | str) -> list[str]:
    """Return the types of the modules that capture joined into one step, else that of the part."""
    if isinstance(part, str):
        return [part]
    return [type(inner).__name__ for inner in part] if isinstance(part, Folded) else [type(part).__name__]
