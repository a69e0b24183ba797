"""The memory of trials: what one reserves, and what follows if Ray's memory monitor kills its worker.

A trial without GPUs reserves on its node what the doctor estimates for its ranks, so that Ray starts only as many
trials at once as fit. A trial whose worker was killed starts again, and fewer run at once on that node.

The monitor: https://docs.ray.io/en/latest/ray-core/scheduling/ray-oom-prevention.html
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import ray
from ray.air.execution._internal import actor_manager
from ray.exceptions import OutOfMemoryError, RayActorError
from ray.tune.execution import tune_controller
from ray.util import placement_group

from tuning.search import Search

ESTIMATE_SECONDS = 600.0
KILLED = re.compile(r"running low on memory\. .*?\(IP: ([^,)]+)")  # in Ray's words


def reserved(search: Search) -> tuple[Search, str]:
    """Return the search with the memory that a trial reserves on each node, and a line about it, or ''.

    A search with GPUs, with memory of its own, or which waits for nodes stays as it is. An estimate refuses no trial:
    at most the memory of the largest node is reserved.
    """
    largest = max(int(node["Resources"].get("memory", 0)) for node in ray.nodes() if node["Alive"])
    if "memory" in search.resources or search.resources.get("GPU") or search.wait or not largest:
        return search, ""
    env = os.environ | {"WORLD_SIZE": str(search.ranks * search.nodes)}
    command = [sys.executable, "-m", "trainers.doctor", "--bytes", str(search.script), *search.overrides]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=ESTIMATE_SECONDS, check=False)
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["no reason"])[-1]
        return search, f"the memory of a trial is unknown ({why}); set memory=BYTES in --resources-per-trial"
    bytes_of_trial = search.ranks * int(done.stdout.split()[-1])
    share = min(bytes_of_trial, largest)
    text = f"a trial reserves {share / 2**30:.2f} GiB (the doctor's estimate; memory=BYTES in --resources-per-trial)"
    return replace(search, resources={**search.resources, "memory": share}), text


def count_as_lost() -> None:
    """Make Tune treat a worker killed for memory as lost: any other error of a worker ends the search."""
    for module in (actor_manager, tune_controller):
        module.RayActorError = (RayActorError, OutOfMemoryError)


def short_node(failure: str) -> str | None:
    """Return the address of the node that ran out of memory, or None for another failure."""
    found = KILLED.search(failure)
    return found[1] if found else None


def run_fewer(search: Search, node: str, trials: Iterable[Any]) -> str:
    """Reserve a trial's share of the node until the search ends, if other trials run there; return what was done."""
    if not any(trial.status == "RUNNING" and trial.get_ray_actor_ip() == node for trial in trials):
        return f"node {node} ran out of memory"
    placement_group([{**search.resources, f"node:{node}": 0.001}])
    return f"node {node} ran out of memory; from now on one trial fewer runs there"
