"""The image list over a Ray cluster (https://docs.ray.io): what workers.py does on one machine, over all nodes.

One actor a CPU, or a GPU, of the cluster computes batches as a process here would. The hand-over travels to them, the
images too, and rows come back: the nodes need the code and no common folder. Batches are dealt out in order and come
back in order. An actor whose node is lost begins anew on another one and does its batch again, so that nothing of a
result depends on which nodes there were.
"""

import logging
import os
import tempfile
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from certify.rows.columns import Row
from certify.rows.workers import Batch, Crew, Make, Work
from certizoo import UserError

os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 gives a worker what other programs leave
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util import ActorPool

LARGEST = 2**31  # bytes of a hand-over: it is kept in every node's memory
RESTARTS = 8  # of an actor, and of a batch: a batch that kills its process each time ends the run


def by_ray(handover: Path, make: Make, crew: Crew, batches: Iterable[Batch]) -> Generator[list[Row], None, None]:
    """The rows of every batch. Joins the cluster of this machine, or that of RAY_ADDRESS, or starts one of its own.
    Raises UserError where a batch is lost for good."""
    ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.CRITICAL, ignore_reinit_error=True)
    try:
        wanted = {"num_cpus": 1, "num_gpus": 1 if crew.device == "cuda" else 0}
        count = crew.workers or _room(crew.device)
        files = ray.put(_packed(handover))
        actor = ray.remote(**wanted, max_restarts=RESTARTS, max_task_retries=RESTARTS, scheduling_strategy="SPREAD")(
            Worker
        )
        yield from _dealt_out(ActorPool([actor.remote(files, make) for _ in range(count)]), count, batches)
    finally:
        ray.shutdown()


class Worker:
    """One process of the cluster."""

    def __init__(self, files: dict[str, bytes], make: Make) -> None:
        torch.set_num_threads(1)
        with tempfile.TemporaryDirectory() as folder:
            for name, content in files.items():
                (Path(folder) / name).write_bytes(content)
            self._work: Work = make(Path(folder), 0)  # Ray shows a process its own GPU alone

    def rows(self, keys: list[str], images: np.ndarray, labels: np.ndarray) -> list[Row]:
        return self._work((keys, torch.from_numpy(images.copy()), torch.from_numpy(labels.copy())))


def _dealt_out(pool: Any, count: int, batches: Iterable[Batch]) -> Iterator[list[Row]]:
    """In order, with enough in flight for all to be busy, and not all images in memory."""
    flying = 0
    for batch in batches:
        pool.submit(_submitted, batch)
        flying += 1
        if flying > 2 * count:
            yield _next(pool)
            flying -= 1
    for _ in range(flying):
        yield _next(pool)


def _submitted(actor: Any, batch: Batch) -> Any:
    keys, images, labels = batch
    return actor.rows.remote(keys, images.numpy(), labels.numpy())


def _next(pool: Any) -> list[Row]:
    try:
        rows: list[Row] = pool.get_next()
    except RayActorError as error:
        raise UserError(
            f"a worker ended {1 + RESTARTS} times in one batch, for want of memory perhaps ({_first_line(error)}); the "
            "same command goes on after the last row, with a smaller batch_size if need be"
        ) from None
    except RayTaskError as error:
        raise error.cause from None  # what it said there
    return rows


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:200]


def _packed(handover: Path) -> dict[str, bytes]:
    """The files of a hand-over, by name."""
    files = [path for path in sorted(handover.iterdir()) if path.is_file()]
    if (size := sum(path.stat().st_size for path in files)) > LARGEST:
        raise UserError(f"{handover} has {size} bytes, more than {LARGEST} that are sent to nodes; use on=here")
    return {path.name: path.read_bytes() for path in files}


def _room(device: str) -> int:
    """Workers that fit the nodes as they are."""
    name = "GPU" if device == "cuda" else "CPU"
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    room = sum(int(node.get(name, 0)) for node in nodes)
    if room < 1:
        raise UserError(f"on=ray: {len(nodes)} nodes have no {name}; add one, or set device to what they have")
    return room
