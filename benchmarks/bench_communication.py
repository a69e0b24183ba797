"""Bytes that a rank hands to collective operations in a training step, by ZeRO stage and number of ranks.

The trainer's own step runs on real ranks of gloo, with PGD and MSVP. Every operation of torch.distributed is seen as it
is dispatched; its payload is the whole tensor that the ranks share. Of a ring, a rank sends, and receives, the shares

    all-reduce 2 (N - 1) / N,    reduce-scatter, all-gather and, on average, reduce (N - 1) / N

of it. `parameters_sent` is the sum in units of 4 P bytes, P the number of parameters, and carries over to other models.
Broadcasts are of buffers, and not in it. Stage 3 gathers the weights again for every pass.

    python -m benchmarks.bench_communication [--ranks 1 2 4 8] [--stages 0 1 2 3]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import certizoo.shards.__main__
import zoo
from benchmarks.record import record
from certizoo.config.compose import compose_config
from certizoo.ports import free_port

if TYPE_CHECKING:
    from trainers.engine.world import World

ATTACK_STEPS, BATCH = 2, 64
RING = {"allreduce": 2, "reduce_scatter": 1, "allgather": 1, "reduce_": 1}  # times (N - 1) / N
MODULE = "benchmarks.bench_communication"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--rank-in", type=Path, metavar="FOLDER", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_in:
        one_rank(sorted(options.stages), options.rank_in)
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        certizoo.shards.__main__.main(["digits", folder])
        for ranks in options.ranks:
            rows += started(options.stages, ranks, folder)
        rows.sort(key=lambda row: (row["stage"], row["ranks"]))
        record("communication_cpu", {"attack_steps": ATTACK_STEPS, "batch": BATCH, "rows": rows})


def started(stages: list[int], ranks: int, folder: str) -> list[dict[str, Any]]:
    """Run the ranks; return what the first one counted at each stage."""
    launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    words = ["--rank-in", folder, "--stages", *map(str, stages)]
    command = [*launcher, f"--master-port={free_port()}", "-m", MODULE, *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"})
    found: list[dict[str, Any]] = json.loads((Path(folder) / "counted.json").read_text())
    return found


def one_rank(stages: list[int], folder: Path) -> None:
    """Count at each stage in one process; stage 3, which replaces torch's linear function, comes last."""
    from trainers.engine import engine

    world = engine.start(5)
    found = [{"stage": stage, "ranks": world.size, **counted(stage, folder, world)} for stage in stages]
    if world.rank == 0:
        (folder / "counted.json").write_text(json.dumps(found))
    engine.stop()
    os._exit(0)  # the threads of several engines may abort the process at its end


def counted(stage: int, folder: Path, world: "World") -> dict[str, Any]:
    """Make two training steps, and count the second: the first one starts traces and buffers."""
    from trainers.job.prepare import prepare
    from trainers.steps.run import assemble
    from trainers.steps.step import train_step

    overrides = (
        "+model=spec_vit_digits", "data=digits", f"data.root={folder}", f"deepspeed=zero{stage}", "penalty=msvp",
        "attack=pgd_linf", f"attack.steps={ATTACK_STEPS}", f"train.batch_size={BATCH}", "train.precision=fp32",
        f"run_dir={folder}/runs/{stage}-{world.size}", "registry.enabled=false", "certify.enabled=false",
    )  # fmt: skip
    job = prepare(compose_config("adv_train", overrides))
    parameters = sum(parameter.numel() for parameter in zoo.create_model(**job.model).parameters())
    run = assemble(job, world)
    images, labels = torch.rand(BATCH // world.size, 1, 8, 8), torch.arange(BATCH // world.size) % 10
    train_step(run, iter([(images, labels)]), 0, 1e-3)
    with Collectives(world.size) as seen:
        train_step(run, iter([(images, labels)]), 1, 1e-3)
    found = {"parameters": parameters, "payload_bytes": dict(seen.payload), "sent_bytes": round(seen.sent)}
    return found | {"parameters_sent": round(seen.sent / (4 * parameters), 3)}


class Collectives(TorchDispatchMode):
    """Counts the payload of each kind of collective operation in bytes, and what a rank sends of it in a ring."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks, self.payload, self.sent = ranks, Counter[str](), 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.note(func.__name__, [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)])
        return func(*args, **(kwargs or {}))

    def note(self, name: str, tensors: list[Tensor]) -> None:
        """Add an operation. The payload is the largest of its tensors: of input and output, the one of all ranks."""
        kind = next((kind for kind in RING if kind in name.replace("_all_gather", "allgather")), name.partition(".")[0])
        if not tensors or kind.startswith("barrier"):
            return
        sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
        whole = max(sizes) if kind in ("allgather", "reduce_scatter") and max(sizes) > min(sizes) else sum(sizes)
        self.payload[kind] += whole
        if kind != "broadcast_":
            self.sent += whole * (RING[kind] * (self.ranks - 1) / self.ranks if kind in RING else 1)


if __name__ == "__main__":
    main()
