"""Findings about this machine and about the needs of a configuration on it.

    python -m trainers.doctor
    python -m trainers.doctor +model=spec_vit_b data=cifar10 deepspeed=zero2
    python -m trainers.doctor trainers/constrain.py +model=l2_deit_ti pretrained=WEIGHTS
    python -m trainers.doctor --bytes +model=spec_vit_b data=cifar10     # only the estimated bytes of a rank

The arguments are those of the `deepspeed` command; without a script they are for trainers/adv_train.py. The doctor
raises the same errors as the script (trainers/job/prepare.py), and neither trains nor writes. Exit status: 1 if
something needed is missing or wrong, 2 for a wrong command. The number of ranks is WORLD_SIZE, or what the launcher
would start: one per GPU, or LOCAL_SIZE.
"""

import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from certizoo import UserError
from certizoo.__main__ import SCRIPTS
from certizoo.config.compose import compose_config
from certizoo.config.help import config_help, wants_help
from certizoo.errors import one_line_errors
from certizoo.shards.ring import shared_bytes
from trainers import ranks
from trainers.doctor.estimate import Estimate, estimate
from trainers.doctor.machine import Finding, disk, machine, registry, size
from trainers.job.job import Job
from trainers.job.keys import TrainerKeys
from trainers.job.stages import prepare_first

STATUS_MISSING = 1


@one_line_errors
def main(argv: Sequence[str]) -> int:
    """Print the table and return the exit status."""
    if wants_help(argv):
        sys.stdout.write(f"{__doc__}\n{config_help('python -m trainers.doctor', 'adv_train', TrainerKeys)}")
        return 0
    os.environ.setdefault("WORLD_SIZE", str(ranks_here()))
    if argv[:1] == ["--bytes"]:
        config, libraries = compose_config(*command(argv[1:])), psutil.Process().memory_info().rss
        job = prepare_first(config)
        sys.stdout.write(f"{needed_by(job, estimate(job, ranks.world_size()), libraries)}\n")
        return 0
    findings = list(machine(ranks.world_size()))
    findings += configured(argv) if argv else [registry(None), disk(Path("runs"), 0)]
    Console(highlight=False, markup=False).print(table(findings))
    return STATUS_MISSING if any(finding.fits is False for finding in findings) else 0


def table(findings: Sequence[Finding]) -> Table:
    """Format the findings for the terminal."""
    shown = Table(title="doctor", title_justify="left", show_header=False)
    for finding in findings:
        fix = f"\n{finding.fix}" if finding.fits is False and finding.fix else ""
        marks = {None: Text(), True: Text("ok", "green"), False: Text(finding.mark, "red")}
        shown.add_row(finding.what, Text(finding.found).append(fix, "red"), marks[finding.fits])
    return shown


def ranks_here() -> int:
    """Return the number of ranks that the `deepspeed` launcher starts on this machine; they share its memory."""
    return torch.cuda.device_count() or int(os.environ.get("LOCAL_SIZE", "1"))


def configured(argv: Sequence[str]) -> list[Finding]:
    """Compare the needs of this command's run with what the machine has."""
    config = compose_config(*command(argv))
    settings: dict[str, Any] = config["registry"]
    found = [registry(settings["uri"])] if settings["enabled"] else []
    libraries = psutil.Process().memory_info().rss
    try:
        job = prepare_first(config)
    except UserError as error:
        return [*found, Finding("configuration", str(error), False, mark="wrong")]
    need = estimate(job, ranks.world_size())
    return [*found, *data(job, need), *memory(job, need, libraries), disk(job.run_dir, need.disk), *loaders(job)]


def command(argv: Sequence[str]) -> tuple[str, Sequence[str]]:
    """Return (name of the configuration, overrides)."""
    script = Path(argv[0])
    return (script.stem, argv[1:]) if script.suffix == ".py" and script.stem in SCRIPTS else (SCRIPTS[0], argv)


def data(job: Job, need: Estimate) -> Iterator[Finding]:
    """Report the shards and the number of steps they give."""
    sets = {"train": job.train_set, "test": job.test_set}
    found = [f"{name}: {len(each.paths)} shards, {each.samples} images" for name, each in sets.items() if each]
    yield Finding("data", ", ".join(found), True)
    batch = f"{job.train.batch_size} images per step ({job.train.micro_batch(ranks.world_size())} per rank and pass)"
    if job.auto_settings:
        yield Finding("auto settings", ", ".join(job.auto_settings))
    yield Finding("steps", f"{need.steps_per_epoch} per epoch, {need.total_steps} in all; {batch}")


def memory(job: Job, need: Estimate, libraries: int) -> Iterator[Finding]:
    """Compare the memory of a rank with the free memory."""
    more = {"average": need.average, "teacher": need.teacher}
    own = "".join(f", {name} {size(held)}" for name, held in more.items() if held)
    held = f"weights {size(need.weights)}, gradients {size(need.gradients)}, optimiser {size(need.states)}{own}"
    yield Finding("model", f"{need.parameters / 1e6:.2f} M parameters")
    yield Finding(f"ZeRO {job.deepspeed.stage}", f"a rank holds {held}")
    yield Finding("activations", f"about {size(need.activations)} per rank (an estimate)")
    needed = needed_by(job, need, libraries)
    if torch.cuda.is_available():
        free = torch.cuda.mem_get_info()[0]
    else:
        free = psutil.virtual_memory().available // min(ranks.world_size(), ranks_here())
    text = (
        f"about {size(needed)} per rank (an estimate; libraries on a CPU {size(libraries)}); {size(free)} free per rank"
    )
    fix = "a smaller train.micro_batch_size, train.grad_checkpointing=true, train.precision=bf16 or deepspeed=zero2"
    yield Finding("memory", text, needed <= free, fix)
    kept = f"{job.train.keep_checkpoints} kept, one being written, and the hand-over"
    yield Finding("checkpoints", f"{size(need.checkpoint)} each; {kept}: {size(need.disk)}")


def needed_by(job: Job, need: Estimate, libraries: int) -> int:
    """Return the bytes of a rank: those on its GPU, or without GPUs in memory."""
    if torch.cuda.is_available():
        return need.a_rank - (need.states if job.deepspeed.offload_optimizer else 0)
    return need.a_rank + libraries


def loaders(job: Job) -> Iterator[Finding]:
    """Check the shared memory for the loader processes."""
    if job.data.workers and Path("/dev/shm").is_dir():
        micro, data = job.train.micro_batch(ranks.world_size()), job.data
        wanted = ranks_here() * shared_bytes(data.workers, micro, *data.shape)
        free = shutil.disk_usage("/dev/shm").free
        text = f"{data.workers} loaders per rank take {size(wanted)}; {size(free)} free"
        yield Finding("/dev/shm", text, free >= wanted, "fewer data.workers, or a larger /dev/shm (docker: --shm-size)")
