"""Does MSVP make a ViT more robust, and at which lambda? SpecFormer's penalty from 0 to 0.1, all else equal.

    python -m benchmarks.msvp std data.root=SHARDS     standard training, attacks of 2/255
    python -m benchmarks.msvp adv data.root=SHARDS     adversarial training, attacks of 8/255

Trains configs/experiment/msvp_std.yaml or msvp_adv.yaml for each lambda (of W_Q, W_K and W_V) and seed, in runs/, and
measures each run: accuracy under attack, the largest singular value of a head's weights, and radii in L2 by `adjoint`.
Results, written after each run: benchmarks/results/msvp_TRACK.json and .md. The command goes on after the last of them;
delete both files to start again. The columns are those of SpecFormer's Tables 1 and 2
(https://arxiv.org/abs/2402.03317).
"""

import argparse
import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product

import torch
from torch import Tensor, nn

from benchmarks.record import RESULTS, record
from benchmarks.trainings import Training, attacked, loaded, portable, train
from certify import certified_radius
from certizoo import UserError
from certizoo.attacks.auto import AutoAttack
from certizoo.config.compose import compose_config
from certizoo.errors import one_line_errors
from certizoo.shards import DataConfig, eval_loader, find

LAMBDAS = ("0.0", "1.0e-4", "1.0e-3", "1.0e-2", "1.0e-1")
SEEDS = (0, 1, 2)
CERTIFIED = 300  # images
EPS = (0.0005, 0.001, 0.002, 0.005, 0.01)  # L2
METHOD = "adjoint"  # `best` takes a hundred times as long
NONCE = "msvp"
BATCH = 10
IMAGES = 1000  # under attack
# track -> its trainer and the columns of SpecFormer's table
TRACKS = {"std": ("std_train", ("clean", "FGSM", "PGD-2")), "adv": ("adv_train", ("clean", "CW-20", "PGD-20"))}


@dataclass(frozen=True)
class Measured:
    """One run: accuracies and certified shares in per cent, the median radius, sigma_max by branch."""

    penalty: str
    seed: int
    accuracy: dict[str, float]
    certified: dict[str, float]
    median_radius: float
    sigma_max: dict[str, float]


def training(track: str, penalty: str, seed: int, overrides: Sequence[str]) -> Training:
    """Return the run of one lambda and seed."""
    weights = [f"penalty.lambda_{branch}={penalty}" for branch in "qkv"]
    options = (f"+experiment=msvp_{track}", "penalty=msvp", *weights, f"seed={seed}", *overrides)
    return Training(options, compose_config(TRACKS[track][0], options))


def measured(track: str, run: Training, penalty: str, seed: int) -> Measured:
    """Measure a finished run on the first test images."""
    model, data = loaded(run).eval(), DataConfig(**run.config["data"])
    accuracy = attacked(model, data, TRACKS[track][1], IMAGES)
    if track == "adv":
        images_BCHW, labels_B = first_images(model, data, IMAGES)
        attacked_BCHW = AutoAttack("linf", 8 / 255).run(model, images_BCHW, labels_B)
        with torch.no_grad():
            accuracy["AutoAttack"] = 100 * float((model(attacked_BCHW).argmax(1) == labels_B).double().mean())
    radius_B = radii(model, *first_images(model, data, CERTIFIED))
    certified = {str(eps): 100 * float((radius_B >= eps).double().mean()) for eps in EPS}
    return Measured(penalty, seed, accuracy, certified, float(radius_B.median()), sigma_max(model))


def first_images(model: nn.Module, data: DataConfig, count: int) -> tuple[Tensor, Tensor]:
    """Return the first test images and their labels, where the model is."""
    _, images_BCHW, labels_B = next(iter(eval_loader(find(data, "test"), data, batch_size=count, limit=count)))
    device = next(model.parameters()).device
    return images_BCHW.to(device), labels_B.to(device)


def radii(model: nn.Module, images_BCHW: Tensor, labels_B: Tensor) -> Tensor:
    """Return certified radii, 0 where misclassified: (B,)."""
    batches = zip(images_BCHW.split(BATCH), labels_B.split(BATCH), strict=True)
    return torch.cat([certified_radius(model, *batch, method=METHOD, nonce=NONCE) for batch in batches])


def sigma_max(model: nn.Module) -> dict[str, float]:
    """Return the largest singular value of any head's W_Q, W_K and W_V."""
    found = dict.fromkeys("qkv", 0.0)
    for module in model.modules():
        for branch, weight_HOD, _ in getattr(module, "spectral_terms", tuple)():
            if branch in found:
                found[branch] = max(found[branch], float(torch.linalg.matrix_norm(weight_HOD.detach(), 2).max()))
    return found


def run(track: str, overrides: Sequence[str]) -> None:
    """Train and measure what is missing; both files are updated after each run."""
    words = command(track, overrides)
    done = recorded(track, words)
    for seed, penalty in product(SEEDS, LAMBDAS):
        if (penalty, seed) in {(one.penalty, one.seed) for one in done}:
            continue
        one = training(track, penalty, seed, overrides)
        train(TRACKS[track][0], one, to_file=False)
        done.append(measured(track, one, penalty, seed))
        facts = {"command": words, "runs": f"{len(done)} of {len(SEEDS) * len(LAMBDAS)}"}
        record(f"msvp_{track}", facts | {"measured": [*map(asdict, done)]})
        (RESULTS / f"msvp_{track}.md").write_text(markdown(done))


def recorded(track: str, words: str) -> list[Measured]:
    """Return the runs that this command measured before.

    Raises:
        UserError: the record is of another command.
    """
    file = RESULTS / f"msvp_{track}.json"
    if not file.is_file():
        return []
    entry = json.loads(file.read_text())
    if entry["command"] != words:
        raise UserError(f"{file} was made by `{entry['command']}`; give the same options or delete it")
    return [Measured(**one) for one in entry["measured"]]


def command(track: str, overrides: Sequence[str]) -> str:
    """Return the command that makes the same table on another machine."""
    return " ".join(["python -m benchmarks.msvp", track, *portable(overrides)])


def markdown(done: Sequence[Measured]) -> str:
    """Format one line per lambda, mean and standard deviation over seeds, without columns of zeros."""
    columns, shown = list(done[0].accuracy), [eps for eps in EPS if any(one.certified[str(eps)] for one in done)]
    medians = ["median radius"] if any(one.median_radius for one in done) else []  # 0 where half of all are wrong
    head = ["lambda", *(f"{name} %" for name in columns), *(f"certified at {eps:g} %" for eps in shown)]
    head += [*medians, "sigma_max of W_Q, W_K, W_V"]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for penalty in LAMBDAS:
        if runs := [one for one in done if one.penalty == penalty]:
            cells = [spread([one.accuracy[name] for one in runs], 1) for name in columns]
            cells += [spread([one.certified[str(eps)] for one in runs], 1) for eps in shown]
            cells += [spread([one.median_radius for one in runs], 4) for _ in medians]
            cells.append(", ".join(spread([one.sigma_max[branch] for one in runs], 2) for branch in "qkv"))
            lines.append(f"| {float(penalty):g} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def spread(values: Sequence[float], digits: int) -> str:
    """Format mean and standard deviation."""
    deviation = f" +- {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{deviation}"


def asked(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("track", choices=TRACKS)
    parser.add_argument("overrides", nargs="*", help="Hydra overrides, as the trainers take them")
    return parser.parse_intermixed_args(words)


def main() -> None:
    options = asked()
    torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", "1")))
    run(options.track, options.overrides)


if __name__ == "__main__":
    one_line_errors(main)()
