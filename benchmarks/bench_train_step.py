"""Overhead of an adversarial training step beyond its arithmetic.

The trainer's step with PGD-2 and with PGD-10 is compared with the minimum,

    K x (forward + backward to the images) + forward + backward to the weights,

of the same model in the same run, without DeepSpeed, attack, penalty and optimiser. Step and minimum alternate and the
ratio is taken pair by pair, so that a machine whose speed drifts slows both. On a CPU the seconds are processor time of
this process, so other programs do not count.

    python -m benchmarks.bench_train_step [--model spec_vit_ti] [--batch 8] [--pairs 9] [--steps 2 10]

    # an H100 or H200:
    python -m benchmarks.bench_train_step --model spec_vit_b --batch 128 --precision bf16 --peak-tflops 989
"""

import argparse
import statistics
import tempfile

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import certizoo.shards.__main__
import zoo
from benchmarks import timing
from benchmarks.record import record
from certizoo.attacks.loop import probing
from certizoo.config.compose import compose_config
from trainers.engine import engine
from trainers.job.prepare import prepare
from trainers.steps.run import Run, assemble
from trainers.steps.step import train_step

SIZE, CLASSES = 224, 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="spec_vit_ti")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--steps", type=int, nargs="+", default=(2, 10), help="attack steps to measure")
    parser.add_argument("--precision", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--compile", action="store_true", help="compile both models with torch.compile")
    parser.add_argument("--peak-tflops", type=float, help="peak TFLOP/s of the device in this precision, to report MFU")
    options = parser.parse_args()
    world = engine.start(5)
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(options.batch, 3, SIZE, SIZE, generator=generator).to(world.device)
    labels = torch.randint(CLASSES, (options.batch,), generator=generator).to(world.device)
    with tempfile.TemporaryDirectory() as folder:
        certizoo.shards.__main__.main(["digits", folder])  # the trainer needs shards; the images are those above
        results = {
            f"pgd_{steps}": measured(options, steps, run_of(options, steps, folder, world), images, labels)
            for steps in options.steps
        }
    chosen = {key: getattr(options, key) for key in ("model", "batch", "pairs", "precision", "compile")}
    ways = f"_{options.precision}{'_compiled' if options.compile else ''}" if world.device.type == "cuda" else ""
    record(f"train_step_{world.device.type}{ways}", chosen | results)
    engine.stop()


def run_of(options: argparse.Namespace, steps: int, folder: str, world: engine.World) -> Run:
    """Return the recipe as it is trained, with MSVP, clipping and AdamW."""
    overrides = (
        f"+model={options.model}", "data=digits", f"data.root={folder}", f"data.img_size={SIZE}", "data.channels=3",
        f"data.num_classes={CLASSES}", "penalty=msvp", "attack=pgd_linf", f"attack.steps={steps}", "hinge=none",
        f"train.batch_size={options.batch}", f"train.precision={options.precision}", f"name=pgd{steps}",
        f"run_dir={folder}/runs/{steps}", "registry.enabled=false", "certify.enabled=false",
        f"train.compile={options.compile}",
    )  # fmt: skip
    return assemble(prepare(compose_config("adv_train", overrides)), world)


def measured(options: argparse.Namespace, steps: int, run: Run, images: Tensor, labels: Tensor) -> dict[str, object]:
    """Return the seconds of a step and of the minimum, and the quartiles of their ratio."""
    bare: nn.Module = zoo.create_model(**run.job.model).to(images.device).train()
    bare = bare.bfloat16() if options.precision == "bf16" else bare
    with FlopCounterMode(display=False) as counter, torch.no_grad(), run.engine.precision():
        bare(images)
    forward_flops = counter.get_total_flops()
    if options.compile:
        bare.compile()  # after the count of operations, under which compilation would be disabled for good

    def least() -> None:
        with run.engine.precision():
            passes(bare, steps, images, labels)

    def step() -> None:
        train_step(run, iter([(images, labels)]), 0, 1e-5)

    pairs = timing.pairs(step, least, options.pairs, timing.clock_of(images.device))
    seconds_step = statistics.median(first for first, _ in pairs)
    # A backward pass to images or to weights costs one forward pass
    rate = (2 * steps + 3) * forward_flops / seconds_step / 1e12
    return {
        "seconds_step": seconds_step,
        "seconds_least": statistics.median(second for _, second in pairs),
        **timing.ratio_of(pairs),
        "images_per_second": len(images) / seconds_step,
        "tflops_per_second": rate,
        "mfu": rate / options.peak_tflops if options.peak_tflops else None,
    }


def passes(model: nn.Module, steps: int, images: Tensor, labels: Tensor) -> None:
    """Run the arithmetic of one step and nothing else."""
    x = images.requires_grad_()
    with probing(model):
        for _ in range(steps):
            torch.autograd.grad(F.cross_entropy(model(x).float(), labels), x)
    model.zero_grad()
    F.cross_entropy(model(images.detach()).float(), labels).backward()
    images.requires_grad_(False)


if __name__ == "__main__":
    main()
