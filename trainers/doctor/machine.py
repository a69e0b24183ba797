"""Properties of this machine, one `Finding` at a time (trainers/doctor/findings.py prints them)."""

import os
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch
from packaging.requirements import Requirement

from certizoo import UserError
from certizoo.registry.server import store

TRAINING = ("train", "evaluate", "registry")  # extras


@dataclass(frozen=True)
class Finding:
    """A line of the doctor's table.

    `fits` is None if there is nothing to judge; `fix` and `mark` are shown if it does not fit.
    """

    what: str
    found: str
    fits: bool | None = None
    fix: str = ""
    mark: str = "missing"


def machine(ranks: int) -> Iterator[Finding]:
    """Report what matters for every run."""
    cores = len(os.sched_getaffinity(0))
    threads = os.environ.get("OMP_NUM_THREADS", "not set: torch takes all cores on each rank")
    yield Finding("ranks", f"{ranks} on {cores} cores; OMP_NUM_THREADS {threads}")
    yield gpus()
    yield Finding("bf16", bf16())
    yield from requirements()
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    yield Finding("C++ compiler", compiler or "none: only train.compile=true needs one")
    launcher = shutil.which("deepspeed", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    yield Finding("launcher", launcher or "no `deepspeed` command", launcher is not None, "make install")
    hosts = [tool for tool in ("ssh", "pdsh") if shutil.which(tool)]
    yield Finding("several machines", f"{', '.join(hosts) or 'no ssh'} (a hostfile needs ssh, and pdsh by default)")


def gpus() -> Finding:
    """Report names and free memory of the GPUs; without a GPU, ranks use gloo."""
    if not torch.cuda.is_available():
        return Finding("GPUs", "none: ranks compute on the CPU and use gloo", torch.distributed.is_gloo_available())
    free = [torch.cuda.mem_get_info(index)[0] for index in range(torch.cuda.device_count())]
    names = {torch.cuda.get_device_name(index) for index in range(len(free))}
    text = f"{len(free)} x {', '.join(names)}, {size(min(free))} free"
    return Finding("GPUs", text, torch.distributed.is_nccl_available(), "install a torch with NCCL")


def bf16() -> str:
    """Report whether a GPU supports bf16; on a CPU, its speed relative to float32."""
    if torch.cuda.is_available():
        native = torch.cuda.is_bf16_supported(including_emulation=False)
        return "yes: train.precision=bf16 takes a fraction of the time of fp32" if native else "emulated: slow"
    ratio = seconds(torch.float32) / seconds(torch.bfloat16)
    return f"yes, {ratio:.2g} times the speed of fp32 (768 x 768 product, {torch.get_num_threads()} threads)"


def seconds(dtype: torch.dtype) -> float:
    """Time three warm matrix products."""
    a = torch.ones(768, 768, dtype=dtype)
    a @ a
    begin = time.perf_counter()
    for _ in range(3):
        a @ a
    return time.perf_counter() - begin


def requirements() -> Iterator[Finding]:
    """Compare installed versions with what training requires."""
    try:
        wanted = [Requirement(text) for text in metadata.requires("certizoo") or []]
    except metadata.PackageNotFoundError:
        yield Finding("versions", "the project is not installed", False, "make install")
        return
    shown, wrong = [], []
    for requirement in (r for r in wanted if r.name != "certizoo" and _for_training(r)):
        version = version_of(requirement.name)
        shown.append(f"{requirement.name} {version}")
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"'{requirement}'")
    text = f"Python {sys.version.split()[0]}, " + ", ".join(shown)
    yield Finding("versions", text, not wrong, f"pip install {' '.join(wrong)}")


def _for_training(requirement: Requirement) -> bool:
    marker = requirement.marker
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in TRAINING)


def version_of(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def registry(uri: str | None) -> Finding:
    """Check that MLflow answers. A missing SQLite file is created by the first run, not here."""
    uri = store.resolve_uri(uri)
    if uri.startswith(store.SQLITE) and not store.database(uri).exists():
        return Finding("registry", f"{store.public(uri)} will be created", True)
    try:
        with store.one_line(uri):
            store.connect(uri).search_experiments(max_results=1)
    except UserError as error:
        return Finding("registry", str(error), False, "start it, or set registry.enabled=false")
    return Finding("registry", f"{store.public(uri)} answers", True)


def disk(folder: Path, needed: int) -> Finding:
    """Report the free space at the run folder."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    return Finding("disk", f"{size(free)} free at {there}", free >= needed, "free some space, or set run_dir=ELSEWHERE")


def size(count: float) -> str:
    """Format bytes: 123 -> '123 B', 3e9 -> '2.8 GiB'."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
