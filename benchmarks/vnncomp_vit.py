"""The `vit` benchmark of VNN-COMP 2023: how many of its properties are proved, beside the published counts.

It has two Vision Transformers with batch norms and ReLU (Shi et al. 2023: pgd_2_3_16 and ibp_3_3_8) on CIFAR-10 and 100
properties of each: an image keeps its class on the box of +-1/255 around it, clipped to [0,1]. Properties that plain
CROWN proves or an attack refutes were left out of the benchmark. FOLDER is `benchmarks/vit` of
https://github.com/ChristopherBrix/vnncomp2023_benchmarks: instances.csv, onnx/ and vnnlib/, packed or not.

A net is read into our modules (benchmarks/vnncomp). Before anything is certified, its logits are compared with those of
onnxruntime on the file itself, at the centre of every box and near it. The certificate covers the ball in Linf around
the centre that contains the box.

With --decide SECONDS, a property is attacked, bounded by `linear` on the box itself, and split into parts until it is
verified or refuted, or its time is over. An image that refutes it is of another class for onnxruntime as well. With
--rows FILE, answers are appended to FILE as they come, and a later run with the same file goes on after them.

    python -m benchmarks.vnncomp_vit FOLDER [--method best] [--instances 20] [--seconds 600] [--radii 5]
    python -m benchmarks.vnncomp_vit FOLDER --decide 60 [--net pgd_2_3_16] [--instances 20] [--rows FILE]
"""

import argparse
import csv
import io
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pandas as pd
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from timm.layers import PatchEmbed
from torch import Tensor

from benchmarks.record import record
from benchmarks.vnncomp import vit, vnnlib
from benchmarks.vnncomp.contents import content
from certify.api import certifier, radius_of
from certify.linear.capture import program_of
from certify.linear.enclosures.steps import Box
from certify.linear.verdict import PROVED, REFUTED, UNKNOWN, decide
from certify.methods import METHODS
from certify.shared.breakdown import FIRST_ORDER, averaged, columns
from certify.shared.certificate import Analysis, Explained, margins_of
from certizoo import UserError
from certizoo.errors import one_line_errors
from zoo.models.vit import ViT

# Verified within 100 s each on the competition's machines: alpha_beta_crown/2023_vit/results.csv and
# marabou/2023_vit/results.csv of https://github.com/ChristopherBrix/vnncomp2023_results. The other tools proved none.
PUBLISHED = {
    "pgd_2_3_16": {"alpha-beta-CROWN": 42, "Marabou": 100},
    "ibp_3_3_8": {"alpha-beta-CROWN": 37, "Marabou": 100},
}
VERDICTS = ("verified", "unknown", "misclassified", "refuted")
EPS = 1 / 255
FIRST = f"share.{FIRST_ORDER}"
# Columns that are recorded
COLUMNS = ("net", "instance", "verdict", "eps", "margin", "loss", "radius", "parts", "seconds", "failure")
MAX_INSTANCES = 1000
LOGITS_OFF = 1e-5  # of ours from onnxruntime's float32
OUTSIDE = 1e-6  # how far the centre of a box may lie outside [0,1] by rounding
OUT = 1e-12  # boxes become balls in float64, and grow by this
NOISE = 0.05  # of the images near the centres of boxes at which logits are compared


Row = dict[str, Any]


@dataclass(frozen=True)
class Instance:
    """One line of instances.csv: a net and a property, names of files."""

    net: str
    said: str

    @property
    def name(self) -> str:
        return Path(self.said).stem


@dataclass(frozen=True)
class Ball:
    """An image (1, C, H, W) in [0,1] and a radius in Linf that contain the box of a property, which comes with them."""

    image_1CHW: Tensor
    eps: float
    label: int
    box: Box


def instances(folder: Path) -> dict[str, list[Instance]]:
    """Return the instances of instances.csv by net, in order. Raises UserError."""
    text = content(folder, "instances.csv").decode("utf-8", "replace")
    try:
        lines = [line for line in csv.reader(io.StringIO(text)) if line]
    except csv.Error as error:
        raise UserError(f"{folder}/instances.csv is not a table ({error}); fetch it again") from None
    if not 0 < len(lines) <= MAX_INSTANCES or any(len(line) != 3 for line in lines):
        raise UserError(f"{folder}/instances.csv has to be up to {MAX_INSTANCES} lines of net,property,seconds")
    found: dict[str, list[Instance]] = {}
    for net, name, _ in lines:
        found.setdefault(net, []).append(Instance(net, name))
    return found


def ball(said: vnnlib.Property, model: ViT, shape: tuple[int, ...], name: str) -> Ball:
    """Return the smallest ball around the box's centre, in the pixels that `model` normalises. shape: of its images.

    The net's input is (pixels - mean) / std with the model's own numbers, so that lower * std + mean is the box in
    pixels whatever they are.
    """
    if len(said.lower_I) != torch.Size(shape).numel():
        raise UserError(
            f"{name} bounds {len(said.lower_I)} inputs, and the net has {list(shape)}; give its own property"
        )
    if said.label >= model.num_classes:
        raise UserError(
            f"{name} has the label {said.label} of {model.num_classes} classes; give the net's own property"
        )
    mean, std = model.normalize.mean.double(), model.normalize.std.double()
    lower, upper = (torch.from_numpy(side).view(shape) * std + mean for side in (said.lower_I, said.upper_I))
    middle = (lower + upper) / 2
    if bool(((middle < -OUTSIDE) | (middle > 1 + OUTSIDE)).any()):
        raise UserError(f"{name} has a box that is not within [0,1]; give one of pixels in [0,1]")
    middle = middle.clamp(0, 1)
    eps = float(torch.maximum(upper - middle, middle - lower).max()) * (1 + OUT) + OUT
    return Ball(middle[None], eps, said.label, Box(lower[None] - OUT, upper[None] + OUT))


def onnxruntime_logits(net: bytes, inputs: NDArray[np.float32], name: str) -> NDArray[np.float32]:
    """Return the file's own logits, one image at a time. Raises UserError if they cannot be computed."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = torch.get_num_threads(), 4
    try:
        session = onnxruntime.InferenceSession(net, options, providers=["CPUExecutionProvider"])
        (given,) = session.get_inputs()
        return np.concatenate([session.run(None, {given.name: one[None]})[0] for one in inputs])
    except Exception as error:  # any error of a foreign library
        raise UserError(f"onnxruntime cannot compute {name} ({str(error)[:200]}); fetch it again") from None


def compare(net: bytes, model: ViT, images_BCHW: Tensor, name: str) -> float:
    """Return the largest difference of logits between onnxruntime and our model, over 1 + |logit|.

    Raises:
        UserError: they are not the same function.
    """
    noise = NOISE * (2 * torch.rand(images_BCHW.shape, generator=torch.Generator().manual_seed(0)) - 1)
    images = torch.cat([images_BCHW, (images_BCHW + noise).clamp(0, 1)])
    with torch.no_grad():
        inputs, ours = model.normalize(images).float().numpy(), model(images).numpy()
    theirs = onnxruntime_logits(net, inputs, name)
    off = float((abs(ours - theirs) / (1 + abs(ours))).max()) if theirs.shape == ours.shape else np.inf
    if not off <= LOGITS_OFF:
        raise UserError(
            f"{name} was read as another function than onnxruntime's (logits off by {off:.3g}); not certified"
        )
    return off


def answer(analysis: Analysis, eps: float) -> dict[str, Any]:
    """Return what is proved for the one ball of an analysis; a loss without a bound is left out."""
    found = analysis.at(eps)
    margin, loss = found.margin_B.item(), found.loss_B.item()
    return {
        "verdict": "verified" if found.certified_B.item() else "unknown" if found.correct_B.item() else "misclassified",
        "eps": eps,
        "margin": float(f"{margin:.6g}"),
        "loss": float(f"{loss:.6g}") if math.isfinite(loss) else None,
        "failure": analysis.failure,
    }


def decided(model: ViT, net: bytes, around: Ball, seconds: float, device: str) -> Row:
    """Return the row of one property, decided within these seconds: the process's own time, or real time on a GPU."""
    clock = time.process_time if device == "cpu" else time.monotonic
    start = clock()
    with torch.no_grad():
        margin = float(margins_of(model.cpu()(around.image_1CHW), torch.tensor([around.label])).min())
    model = model.to(device)
    program = program_of(model, tuple(around.image_1CHW.shape[1:]))
    box = Box(around.box.lower.to(device), around.box.upper.to(device))
    found = decide(model, program, box, around.label, seconds, clock)
    verdict = {PROVED: "verified", REFUTED: "refuted", UNKNOWN: "unknown"}[found.answer]
    if found.image is not None:
        inputs = model.normalize(found.image).float().cpu().numpy()
        theirs = onnxruntime_logits(net, inputs, "the net")[0]
        verdict = "refuted" if theirs.argmax() != around.label else "unknown"
    spent = round(clock() - start, 3)
    return {"verdict": verdict, "eps": around.eps, "margin": float(f"{margin:.6g}"), "loss": None,
            "parts": found.parts, "seconds": spent, "failure": 0.0}  # fmt: skip


def rows_of(folder: Path, listed: list[Instance], given: argparse.Namespace) -> Iterator[Row]:
    """Iterate over one row per instance of a net, until its time is over."""
    net = content(folder, listed[0].net)
    model = vit.read(net)
    assert isinstance(model.patch_embed, PatchEmbed), "its reader makes no other"
    shape = (model.patch_embed.proj.weight.shape[1], *model.patch_embed.img_size)
    balls = [ball(vnnlib.parse(content(folder, one.said), one.said), model, shape, one.said) for one in listed]
    compare(net, model, torch.cat([one.image_1CHW for one in balls]), listed[0].net)
    begun, radii = time.monotonic(), given.radii
    if given.decide is not None:
        name = Path(listed[0].net).stem
        known = {row["instance"]: row for row in known_rows(given.rows, given.decide) if row["net"] == name}
        for one, around in zip(listed, balls, strict=True):
            if time.monotonic() - begun > given.seconds:
                return
            if one.name not in known:
                row = {"net": name, "instance": one.name, **decided(model, net, around, given.decide, given.device)}
                known[one.name] = row | {"limit": given.decide}
                append(given.rows, known[one.name])
            yield known[one.name]
        return
    prover = certifier(model, given.method, given.nonce, "linf")
    for one, around in zip(listed, balls, strict=True):
        if time.monotonic() - begun > given.seconds:
            return
        start = time.perf_counter()
        analysis = prover.analyse(around.image_1CHW, torch.tensor([around.label]))
        row = answer(analysis, around.eps)
        row["seconds"] = round(time.perf_counter() - start, 3)
        if row["verdict"] == "unknown":
            row |= columns(analysis.breakdown(around.eps))[0] if isinstance(analysis, Explained) else {}
            row |= {"radius": float(radius_of(analysis))} if radii > 0 else {}
            radii -= 1
        yield {"net": Path(one.net).stem, "instance": one.name, **row}


def known_rows(path: Path | None, limit: float) -> list[Row]:
    """Return the rows of a file that were decided within the same time. Raises UserError."""
    lines = path.read_text().splitlines() if path is not None and path.exists() else []
    try:
        rows = [json.loads(line) for line in lines]
        same = all(row["limit"] == limit and row["net"] and row["instance"] for row in rows)
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path} has a line that is not a row; remove it") from None
    if not same:
        raise UserError(f"{path} has rows with another limit than {limit:g}; give another file")
    return rows


def append(path: Path | None, row: Row) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def summary(net: str, listed: int, rows: list[Row]) -> Row:
    """Summarise one net: counts, times, the gaps of the bounds, and the cost of the stages of unknown answers."""
    verdicts = [row["verdict"] for row in rows]
    ratios = [row["loss"] / row["margin"] for row in rows if row["margin"] > 0 and row["loss"] is not None]
    open_rows = pd.DataFrame([row | {"correct": True} for row in rows if row["verdict"] == "unknown"])
    return {
        "net": net,
        "listed": listed,
        "tried": len(rows),
        **{word: verdicts.count(word) for word in VERDICTS},
        "seconds": _median([row["seconds"] for row in rows]),
        "loss_over_margin": _median(ratios),
        "first_order_over_margin": _median(
            [row[FIRST] * row["loss"] / row["margin"] for row in rows if row.get(FIRST)]
        ),
        "radius_over_eps": _median([row["radius"] / row["eps"] for row in rows if "radius" in row]),
        "stages": averaged(open_rows, EPS) if len(open_rows) else None,
        "published": PUBLISHED.get(net, {}),
    }


def _median(values: list[float]) -> float | None:
    return float(f"{np.median(values):.4g}") if values else None


def show(found: list[Row]) -> None:
    """Print one line per net, then the gap to a proof for unknown answers and their most expensive stage."""
    tools = list(dict.fromkeys(tool for one in found for tool in one["published"]))
    table = Table(box=None, pad_edge=False)
    for column in ("net", "tried", *VERDICTS, "s", *tools):
        table.add_column(column, justify="left" if column == "net" else "right")
    for one in found:
        numbers = [one[key] for key in ("tried", *VERDICTS, "seconds")]
        published = [f"{one['published'][tool]}/{one['listed']}" if tool in one["published"] else "" for tool in tools]
        table.add_row(one["net"], *("" if number is None else f"{number:g}" for number in numbers), *published)
    console = Console()
    console.print(table)
    for one in filter(lambda one: one["unknown"], found):
        keys = ("loss_over_margin", "first_order_over_margin", "radius_over_eps")
        said = [f"{key.replace('_', ' ')} {one[key]:.3g}" for key in keys if one[key] is not None]
        if one["stages"] is not None and one["stages"]["steps"]:
            stage, cost = max(one["stages"]["steps"].items(), key=lambda item: item[1])
            said.append(f"{stage} costs most ({one['stages']['quantity']} {cost:.3g})")
        console.print(f"{one['net']}, unknown: {'; '.join(said) or 'no bound'}", soft_wrap=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--method", default="best", choices=METHODS)
    parser.add_argument("--net", metavar="NAME", help="only this net")
    parser.add_argument("--instances", type=int, metavar="N", help="only the first N of each net")
    parser.add_argument("--seconds", type=float, default=np.inf, help="time limit of a net: start no instance after it")
    parser.add_argument(
        "--radii", type=int, default=0, metavar="N", help="find the certified radius of N undecided instances a net"
    )
    parser.add_argument(
        "--decide",
        type=float,
        metavar="SECONDS",
        help="verify or refute each property within these seconds of CPU time (of real time on a GPU)",
    )
    parser.add_argument("--device", default="cpu", help="of --decide: cpu or cuda")
    parser.add_argument("--rows", type=Path, metavar="FILE", help="append answers of --decide to FILE, and go on after")
    parser.add_argument("--nonce", help="nonce of the result to reproduce")
    parser.add_argument("--record", metavar="NAME", help="write benchmarks/results/NAME.json")
    return parser.parse_args()


@one_line_errors
def main() -> None:
    given = arguments()
    rows, found = list[Row](), list[Row]()
    for net, listed in instances(given.folder).items():
        if given.net not in (None, Path(net).stem):
            continue
        own = list(rows_of(given.folder, listed[: given.instances], given))
        rows += own
        found.append(summary(Path(net).stem, len(listed), own))
    show(found)
    if given.record:
        kept = [{key: row[key] for key in COLUMNS if key in row} for row in rows]
        method = given.method if given.decide is None else "linear"
        facts = {"method": method, "limit": given.decide, "norm": "linf", "nets": found, "rows": kept}
        record(given.record, facts)


if __name__ == "__main__":
    main()
