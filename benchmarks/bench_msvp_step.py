"""Cost of the MSVP penalty in an optimiser step of ViT-S/16 at 224 pixels, with and without it in one run.

That ratio is noisy if a step takes seconds, so the penalty's forward and backward passes are also timed alone. A step
is forward, cross-entropy, backward and AdamW; an attack would only dilute the ratio. Steps with and without alternate,
so that a machine whose speed drifts slows both; the ratio is taken pair by pair.

    python -m benchmarks.bench_msvp_step [--batch 16] [--pairs 15]
"""

import argparse
import statistics
import time
from functools import partial

import torch
import torch.nn.functional as F

import zoo
from benchmarks import timing
from benchmarks.record import record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="spec_vit_s")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--pairs", type=int, default=15)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = zoo.create_model(options.model).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    images = torch.rand(options.batch, 3, 224, 224, device=device)
    labels = torch.randint(1000, (options.batch,), device=device)

    def penalty_alone() -> None:
        zoo.penalty.msvp(model, 1e-4, 1e-4, 1e-4).backward()

    def step(penalised: bool) -> None:
        loss = F.cross_entropy(model(images), labels)
        if penalised:
            loss = loss + zoo.penalty.msvp(model, 1e-4, 1e-4, 1e-4)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    pairs = timing.pairs(partial(step, True), partial(step, False), options.pairs, time.perf_counter)
    alone = statistics.median(timing.timed(penalty_alone, time.perf_counter)[1] for _ in range(options.pairs))
    without = statistics.median(without for _, without in pairs)
    record(
        f"msvp_step_{device}",
        {
            "model": options.model,
            "batch": options.batch,
            "pairs": options.pairs,
            "seconds_without": without,
            "seconds_penalty_alone": alone,
            "ratio_from_penalty_alone": 1 + alone / without,
        }
        | timing.ratio_of(pairs),
    )


if __name__ == "__main__":
    main()
