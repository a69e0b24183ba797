"""Trials whose worker Ray's memory monitor killed: they start again, and fewer run at once on that node.

The monitor: https://docs.ray.io/en/latest/ray-core/scheduling/ray-oom-prevention.html
"""

import re
from collections.abc import Iterable
from typing import Any

from ray.air.execution._internal import actor_manager
from ray.exceptions import OutOfMemoryError, RayActorError
from ray.tune.execution import tune_controller
from ray.util import placement_group

from tuning.search import Search

KILLED = re.compile(r"running low on memory\. .*?\(IP: ([^,)]+)")  # in Ray's words


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
