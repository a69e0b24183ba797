"""The image list over a Ray cluster (https://docs.ray.io): the work of workers.py, over all nodes.

Every batch is a task of one CPU or one GPU, which computes it as a local process would. The hand-over and the images
are sent to the nodes, and rows come back: the nodes need the code, but no shared folder. Batches are distributed and
returned in order. Batches of a lost node are computed again by others, and new nodes get their share, so that no result
depends on the set of nodes.
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
from certizoo.ports import ray_address

os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's default 15 gives workers only idle time
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import ray
from ray.exceptions import RayError, RayTaskError

LARGEST = 2**31  # bytes of a hand-over, which is kept in every node's memory
RETRIES = 8  # of a batch; a batch that always kills its process ends the run
AHEAD = 2  # batches in flight per task computed at once: keeps all busy without all images in memory


def by_ray(handover: Path, make: Make, crew: Crew, batches: Iterable[Batch]) -> Generator[list[Row], None, None]:
    """Yield the rows of every batch, by at most crew.workers tasks at once.

    Joins the cluster of this machine, or that of RAY_ADDRESS, or starts a new one. Raises UserError if a batch is lost
    for good, and re-raises the errors of tasks.
    """
    quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.CRITICAL}
    ray.init(ray_address(), ignore_reinit_error=True, **quiet)
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


_works: dict[str, Work] = {}  # of this process, by run number: Ray reuses a process for its next task


def _rows(
    number: str, files: dict[str, bytes], make: Make, keys: list[str], images: np.ndarray, labels: np.ndarray
) -> list[Row]:
    """Return the rows of a batch, on a node. Ray shows a process only its own GPU, and ends it after its task."""
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
        raise error.cause from None  # the error raised on the node
    except RayError as error:
        said = str(error).strip().splitlines()[0][:200]
        raise UserError(
            f"a batch was lost {1 + RETRIES} times, perhaps for lack of memory ({said}); the same command continues "
            "after the last row; reduce batch_size if it happens again"
        ) from None
    return rows


def _packed(handover: Path) -> dict[str, bytes]:
    """Return the files of a hand-over, by name."""
    files = [path for path in sorted(handover.iterdir()) if path.is_file()]
    if (size := sum(path.stat().st_size for path in files)) > LARGEST:
        raise UserError(f"{handover} has {size} bytes, more than the {LARGEST} sent to nodes; use on=here")
    return {path.name: path.read_bytes() for path in files}


def _room(device: str) -> int:
    """Return the number of tasks that fit the present nodes at once."""
    name = "GPU" if device == "cuda" else "CPU"
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    room = sum(int(node.get(name, 0)) for node in nodes)
    if room < 1:
        raise UserError(f"on=ray: none of {len(nodes)} nodes has a {name}; add one, or set another device")
    return room
