"""Two pictures at a run's end, in run_dir/pictures and among the MLflow artifacts. No display is needed.

    adversarial.png   test images: clean, attacked, and their difference times 10 around gray
    sigma_max.png     the spectral norm of every weight matrix that attention and MLPs apply, layer by layer

Legend: x_BCHW images in [0, 1], labels_B; weight_ND a matrix (all heads together).
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor, nn

import zoo
from certizoo.shards import eval_loader
from certizoo.shards.format.config import TEXT
from trainers.job.job import Job
from trainers.seeds import seed_of
from trainers.steps.monitor import LEAST_STEPS
from zoo.penalty import HasSpectralTerms

FOLDER = "pictures"
IMAGES, GAIN = 8, 10
ITERATIONS = 50  # of the power iteration: an estimate from below, for display


def draw(job: Job, handover: Path, device: torch.device) -> Path:
    """Draw both pictures from a hand-over's float32 weights and return their folder."""
    model, _ = zoo.handover.load(handover)
    model.to(device)
    folder = job.run_dir / FOLDER
    folder.mkdir(exist_ok=True)
    if job.test_set is not None and job.data.kind != TEXT:
        adversarial(job, model, device, folder / "adversarial.png")
    norms = sigma_max(model)
    if norms:
        plot_norms(norms, folder / "sigma_max.png")
    return folder


@contextmanager
def _axis(path: Path, size: tuple[float, float]) -> Iterator[Any]:
    """Yield an axis of matplotlib; write the file at the end."""
    import matplotlib  # only rank 0 draws, once

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=size, layout="constrained")
    try:
        yield axis
        figure.savefig(path, dpi=110)
    finally:
        plt.close(figure)


def adversarial(job: Job, model: nn.Module, device: torch.device, path: Path) -> None:
    """Draw the first test images under the run's attack, with the model's predictions for both."""
    attack = job.attack.stronger(LEAST_STEPS)
    _, x_BCHW, labels_B = next(iter(eval_loader(job.test_set, job.data, batch_size=IMAGES, limit=IMAGES)))  # type: ignore[arg-type]
    x_BCHW, labels_B = x_BCHW.to(device), labels_B.to(device)
    generator = Generator().manual_seed(seed_of(job.seed, "pictures"))
    attacked_BCHW = attack.run(model, x_BCHW, labels_B, generator)
    with torch.no_grad():
        said = [model(images_BCHW).argmax(dim=1).tolist() for images_BCHW in (x_BCHW, attacked_BCHW)]
    titles = [f"is {label}: {of_clean}" for label, of_clean in zip(labels_B.tolist(), said[0], strict=True)]
    titles += [f"attacked: {of_attacked}" for of_attacked in said[1]] + [f"difference x{GAIN}"] * len(x_BCHW)
    with _axis(path, (1.3 * len(x_BCHW), 4.0)) as axis:
        _show(axis, torch.cat([x_BCHW, attacked_BCHW, difference(x_BCHW, attacked_BCHW)]), titles, len(x_BCHW))


def _show(axis: Any, images_NCHW: Tensor, titles: Sequence[str], columns: int) -> None:
    """Draw images in rows, each below its title. Two dozen axes would take seconds."""
    from torchvision.utils import make_grid

    height, width = images_NCHW.shape[2:]
    gap = max(1, width // 8)
    pixels_HWC = make_grid(images_NCHW, columns, gap, pad_value=1).permute(1, 2, 0).numpy(force=True)
    axis.imshow(pixels_HWC)
    axis.axis("off")
    for index, title in enumerate(titles):
        row, column = divmod(index, columns)
        left, top = gap + column * (width + gap), gap + row * (height + gap)
        axis.text(left + (width - 1) / 2, top - 0.5 - gap / 8, title, fontsize=7, ha="center", va="bottom")


def difference(x_BCHW: Tensor, attacked_BCHW: Tensor) -> Tensor:
    """Return 1/2 + GAIN (x' - x), clipped to [0, 1]."""
    return (0.5 + GAIN * (attacked_BCHW - x_BCHW)).clamp(0, 1)


@torch.no_grad()
def sigma_max(model: nn.Module) -> dict[str, list[float]]:
    """Return {branch: estimated norms in layer order}, branches as in `zoo.penalty`."""
    norms: dict[str, list[float]] = defaultdict(list)
    for module in model.modules():
        if isinstance(module, HasSpectralTerms):
            for branch, weight_HOD, _ in module.spectral_terms():
                weight_ND = weight_HOD.flatten(0, 1).float()
                norms[branch].append(float(zoo.spectral.sigma_estimate(weight_ND, ITERATIONS)))
    return dict(norms)


def plot_norms(norms: dict[str, list[float]], path: Path) -> None:
    """Draw one line per branch."""
    with _axis(path, (6.4, 4.2)) as axis:
        for branch, values in norms.items():
            axis.plot(range(1, len(values) + 1), values, "o-", label=branch)
        axis.set(xlabel="matrix, in the order of the layers", ylabel=r"$\sigma_{max}$ of the weights (estimate)")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        axis.legend()
