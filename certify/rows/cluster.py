"""The image list over a Ray cluster (https://docs.ray.io): what workers.py does on one machine, over all nodes.

Every batch is a task of one CPU, or of one GPU, which computes it as a process here would. The hand-over travels to the
nodes, the images too, and rows come back: the nodes need the code and no common folder. Batches are dealt out in order
and come back in order. What a lost node had is done again by others, and nodes that join get their share, so that
nothing of a result depends on which nodes there were.
"""

import logging
import os
import tempfile
from collections import deque
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from certify.rows.row_schema import Row
from certify.rows.workers import Batch, Crew, Make, Work
from certizoo import UserError
from certizoo.memory import keep_freed_memory

os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 gives a worker what other programs leave
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import ray
from ray.exceptions import RayError, RayTaskError

LARGEST = 2**31  # bytes of a hand-over: it is kept in every node's memory
RETRIES = 8  # of a batch: one that kills its process each time ends the run
AHEAD = 2  # batches in flight, in units of what is computed at once: all are busy, and not all images in memory


def by_ray(handover: Path, make: Make, crew: Crew, batches: Iterable[Batch]) -> Generator[list[Row], None, None]:
    """The rows of every batch, by at most crew.workers tasks at once. Joins the cluster of this machine, or that of
    RAY_ADDRESS, or starts one of its own. Raises UserError where a batch is lost for good, and what a task raised."""
    ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.CRITICAL, ignore_reinit_error=True)
    try:
        files, number = ray.put(_packed(handover)), os.urandom(8).hex()
        share = {"num_cpus": 1, "num_gpus": 1 if crew.device == "cuda" else 0}
        task: Any = ray.remote(**share, max_retries=RETRIES, scheduling_strategy="SPREAD")(_rows)
        waiting: deque[Any] = deque()
        for keys, images, labels in batches:
            waiting.append(task.remote(number, files, make, keys, images.numpy(), labels.numpy()))
            if len(waiting) >= (crew.workers or AHEAD * _room(crew.device)):
                yield _arrived(waiting.popleft())
        while waiting:
            yield _arrived(waiting.popleft())
    finally:
        ray.shutdown()


_works: dict[str, Work] = {}  # of this process, by the number of a run: Ray keeps a process for its next task


def _rows(
    number: str, files: dict[str, bytes], make: Make, keys: list[str], images: np.ndarray, labels: np.ndarray
) -> list[Row]:
    """On a node: the rows of a batch. Ray shows a process its own GPU alone, and ends it after its task."""
    if number not in _works:
        torch.set_num_threads(1)
        keep_freed_memory()
        with tempfile.TemporaryDirectory() as folder:
            for name, content in files.items():
                (Path(folder) / name).write_bytes(content)
            _works.clear()
            _works[number] = make(Path(folder), 0)
    return _works[number]((keys, torch.from_numpy(images.copy()), torch.from_numpy(labels.copy())))


def _arrived(task: Any) -> list[Row]:
    try:
        rows: list[Row] = ray.get(task)
    except RayTaskError as error:
        raise error.cause from None  # what it said there
    except RayError as error:
        said = str(error).strip().splitlines()[0][:200]
        raise UserError(
            f"a batch was lost {1 + RETRIES} times, for want of memory perhaps ({said}); the same command goes on "
            "after the last row, with a smaller batch_size if need be"
        ) from None
    return rows


def _packed(handover: Path) -> dict[str, bytes]:
    """The files of a hand-over, by name."""
    files = [path for path in sorted(handover.iterdir()) if path.is_file()]
    if (size := sum(path.stat().st_size for path in files)) > LARGEST:
        raise UserError(f"{handover} has {size} bytes, more than {LARGEST} that are sent to nodes; use on=here")
    return {path.name: path.read_bytes() for path in files}


def _room(device: str) -> int:
    """Tasks at once on the nodes as they are."""
    name = "GPU" if device == "cuda" else "CPU"
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    room = sum(int(node.get(name, 0)) for node in nodes)
    if room < 1:
        raise UserError(f"on=ray: {len(nodes)} nodes have no {name}; add one, or set device to what they have")
    return room
