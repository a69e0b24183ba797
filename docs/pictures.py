"""The pictures of docs/explained/methods.md, from values computed here: `python -m docs.pictures`.

A network of two inputs is trained on two moons. It is small enough to compute the truth: the class of every point of
the plane, and the distance from a point to the nearest other class (by a fine grid of the ball). The pictures compare
this with what each method proves.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib import pyplot
from matplotlib.patches import Circle, Rectangle
from sklearn.datasets import make_moons
from torch import Tensor, nn

from benchmarks.record import RESULTS
from certify import certified_radius, certify
from zoo.rules import Links, ModuleRules, register

FOLDER = Path(__file__).parent / "pictures"
COLOURS = {"lofast": "#d81b60", "adjoint": "#f4511e", "image": "#00897b", "truth": "#212121"}
STYLE: Any = {"svg.hashsalt": "certizoo", "font.size": 10, "axes.spines.top": False, "axes.spines.right": False}
SIDE = 160  # points of the plane along an edge
ANGLES, STEPS = 720, 200  # of the grid of a ball


class Plane(nn.Module):
    """Images (B, 1, 1, 2) in [0,1], points of the unit square, -> two logits."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(2, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh())
        self.head = nn.Linear(24, 2)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(x))
        return logits


def parts(model: Plane) -> tuple[Links, nn.Linear]:
    """Split model(x) = head(body(x))."""
    return list(model.body), model.head


register(Plane, ModuleRules(trunk=parts))


@dataclass(frozen=True)
class Scene:
    """The trained network, its training points, and the points to certify."""

    model: Plane
    points: Tensor
    labels: Tensor
    chosen: Tensor  # (B, 1, 1, 2)

    @property
    def answers(self) -> Tensor:
        return self.model(self.chosen).argmax(-1)


def scene() -> Scene:
    """Return the scene, equal on every machine up to rounding."""
    found, labels = make_moons(400, noise=0.08, random_state=0)
    low, high = found.min(0), found.max(0)
    points = torch.tensor(0.1 + 0.8 * (found - low) / (high - low), dtype=torch.float32)
    torch.manual_seed(0)
    model, target = Plane(), torch.tensor(labels)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(250):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(points.view(-1, 1, 1, 2)), target).backward()
        optimizer.step()
    chosen = torch.tensor([[0.30, 0.62], [0.52, 0.80], [0.67, 0.30], [0.85, 0.45]]).view(-1, 1, 1, 2)
    return Scene(model.eval().requires_grad_(False), points, target, chosen)


def margins(model: nn.Module, x_B2: Tensor, label: int) -> Tensor:
    """Return the label's logit minus the other: (B,)."""
    logits = model(x_B2.view(-1, 1, 1, 2))
    return logits[:, label] - logits[:, 1 - label]


def disc(centre: Tensor, eps: float) -> Tensor:
    """Return a grid of the ball, including its edge."""
    angle = torch.linspace(0, 2 * np.pi, ANGLES)[:, None]
    radius = torch.linspace(0, eps, STEPS)[None]
    ring = torch.stack([angle.cos() * radius, angle.sin() * radius], dim=-1).view(-1, 2)
    return centre.view(1, 2) + ring


def true_radius(model: nn.Module, centre: Tensor, label: int) -> float:
    """Return the distance to the nearest point of another class, on the grid."""
    points = disc(centre, 0.5)
    wrong = margins(model, points, label) <= 0
    return float((points[wrong] - centre.view(1, 2)).norm(dim=1).min())


def planes(of: Scene) -> None:
    """Draw classes in the plane, and around four points the proved and the true radii."""
    figure, axes = pyplot.subplots(figsize=(5.6, 5.6), layout="constrained")
    _classes(axes, of)
    methods = ("lofast", "adjoint", "image")
    radii = {
        method: certified_radius(of.model, of.chosen, of.answers, method=method, nonce="picture") for method in methods
    }
    for i, point in enumerate(of.chosen.view(-1, 2)):
        truth = true_radius(of.model, point, int(of.answers[i]))
        for method, radius in [("truth", truth), *((method, float(radii[method][i])) for method in methods)]:
            line = ":" if method == "truth" else "-"
            name = {"truth": "nearest other class"}.get(method, method) if i == 0 else None
            axes.add_patch(
                Circle(point.tolist(), radius, fill=False, color=COLOURS[method], ls=line, lw=1.6, label=name)
            )
        axes.plot(*point.tolist(), "k.", ms=5)
    axes.legend(frameon=True, loc="lower left")
    save(figure, "plane")


def curves(of: Scene) -> None:
    """Draw, for one point, the smallest margin in the ball and each method's lower bound."""
    figure, axes = pyplot.subplots(figsize=(6.4, 4), layout="constrained")
    point, label = of.chosen[3:], int(of.answers[3])
    radii = np.linspace(0.0, 0.14, 57)
    truth = [float(margins(of.model, disc(point, float(eps)), label).min()) for eps in radii]
    axes.plot(radii, truth, color=COLOURS["truth"], ls=":", lw=2, label="least margin of the ball (grid)")
    for method in ("lofast", "adjoint", "image"):
        axes.plot(
            radii, bounds(of, point, label, radii, method), color=COLOURS[method], label=f"{method}: proved of it"
        )
    axes.axhline(0, color="#9e9e9e", lw=0.8)
    axes.set(xlabel="eps", ylabel="margin", ylim=(-truth[0], 1.1 * truth[0]), xlim=(0, radii[-1]))
    axes.legend(frameon=False)
    save(figure, "margin")


def bounds(of: Scene, point: Tensor, label: int, radii: Sequence[float] | np.ndarray, method: str) -> list[float]:
    """Return the lower bound of the margin at each radius: margin - loss there, or at a larger radius.

    A larger ball contains the smaller one. (The prover stops at the first bound that decides, a cheap one if possible.)
    """
    found = []
    for eps in radii:
        c = certify(of.model, point, torch.tensor([label]), eps=float(eps), method=method, nonce="picture")
        found.append(float(c.margin_B - c.loss_B))
    return np.maximum.accumulate(found[::-1])[::-1].tolist()


def balls(of: Scene) -> None:
    """Draw one eps in both norms."""
    figure, axes = pyplot.subplots(figsize=(4.4, 4.4), layout="constrained")
    _classes(axes, of)
    x, y = of.chosen.view(-1, 2)[1].tolist()
    eps, root = 0.1, 2**0.5
    axes.add_patch(
        Rectangle(
            (x - eps, y - eps), 2 * eps, 2 * eps, fill=False, lw=1.8, color="#00897b", label="Linf ball, eps = 0.1"
        )
    )
    axes.add_patch(Circle((x, y), eps, fill=False, lw=1.8, color="#d81b60", label="L2 ball, eps = 0.1"))
    axes.add_patch(
        Circle((x, y), eps * root, fill=False, ls=":", lw=1.4, color="#212121", label="L2 ball, eps = 0.1 sqrt(2)")
    )
    axes.plot(x, y, "k.", ms=5)
    axes.legend(loc="lower left", fontsize=8)
    save(figure, "norms")


def accuracies() -> None:
    """Draw a trained model's results on 1000 test images of CIFAR-10, from the committed files."""
    figure, axes = pyplot.subplots(figsize=(6.4, 4), layout="constrained")
    name = "lofast_vit_c10_smooth_cifar10"
    shown = {"lofast": "#d81b60", "lofast_local": "#8e24aa", "adjoint": "#f4511e"}
    for method, colour in shown.items():
        said = json.loads((RESULTS / f"{name}_{method}.json").read_text())
        axes.plot(*_curve(said, "certified"), color=colour, marker="o", ms=3, label=method)
    axes.plot(*_curve(said, "pgd"), color=COLOURS["truth"], ls=":", marker="x", ms=5, label="PGD-100 (upper bound)")
    axes.set(xlabel="eps, L2", ylabel="% of the images", xlim=(0, None), ylim=(0, None))
    axes.legend(frameon=False)
    save(figure, "accuracy")


def _curve(said: dict[str, Any], kind: str) -> tuple[list[float], list[float]]:
    points = sorted((float(eps), 100 * at[kind]) for eps, at in said["accuracy"].items())
    return [0.0, *(eps for eps, _ in points)], [100 * said["clean"], *(share for _, share in points)]


def _classes(axes: Any, of: Scene) -> None:
    line = torch.linspace(0, 1, SIDE)
    grid = torch.stack(torch.meshgrid(line, line, indexing="xy"), dim=-1).view(-1, 2)
    regions = of.model(grid.view(-1, 1, 1, 2)).argmax(-1).view(SIDE, SIDE)
    axes.contourf(line, line, regions, levels=[-0.5, 0.5, 1.5], colors=["#e3f2fd", "#fff3e0"])
    for label, colour in ((0, "#64b5f6"), (1, "#ffb74d")):
        axes.plot(*of.points[of.labels == label].T.tolist(), ".", color=colour, ms=2.5)
    axes.set(xlim=(0, 1), ylim=(0, 1), aspect="equal", xlabel="first pixel", ylabel="second pixel")


def save(figure: Any, name: str) -> None:
    """Save without a date, so that equal values give equal files."""
    FOLDER.mkdir(exist_ok=True)
    figure.savefig(FOLDER / f"{name}.svg", metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    """Draw all pictures."""
    matplotlib.use("Agg")
    torch.set_num_threads(1)
    with pyplot.rc_context(STYLE):
        found = scene()
        planes(found)
        curves(found)
        balls(found)
        accuracies()


if __name__ == "__main__":
    main()
