"""The nodes of a Ray cluster: how many trials they can run, and the ranks of a trial that spans several nodes.

Such a trial is a placement group with one bundle, of the resources of a trial, on each of its nodes. The trial itself
runs in the first bundle and starts the ranks there; a task in each other bundle starts those of its node. They meet at
the first node's address, like the ranks of DeepSpeed's launcher on several machines.
"""

import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from pyarrow.fs import FileSystem, FileType
from ray import tune
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from certizoo import UserError
from certizoo.errors import EXIT_USER_ERROR
from certizoo.ports import free_port
from tuning import trial as training
from tuning.search import Search
from tuning.trial import Command, Group

ANSWER_SECONDS = 120.0


def at_once(search: Search) -> int:
    """Return how many trials may run together.

    With `wait`, a search for which no trial fits yet returns as many as it would start.

    Raises:
        UserError: no trial fits, and the search does not wait for nodes.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    room = room_on([trials_on(node, search.resources) for node in nodes], search.nodes)
    most = search.max_concurrent or search.num_samples
    if room < 1 and not search.wait:
        names = ("CPU", "GPU", "memory")
        offered = "; ".join(" ".join(f"{name}={node.get(name, 0):g}" for name in names) for node in nodes)
        many = "a node" if search.nodes == 1 else f"{search.nodes} nodes"
        raise UserError(
            f"no trial fits on {many}: --resources-per-trial {dict(search.resources)}, the nodes have {offered}; "
            "request less, start larger nodes, or add --wait if an autoscaler adds them"
        )
    return min(room, most) if room else most


def trials_on(node: Mapping[str, float], wanted: Mapping[str, float]) -> int:
    """Return how many shares of a trial fit on the node; the remainders of two nodes do not add up to another share."""
    return int(min((node.get(name, 0) // share for name, share in wanted.items() if share > 0), default=0))


def room_on(shares: Sequence[int], nodes: int) -> int:
    """Return the largest number of trials for which each gets a share on `nodes` different nodes."""
    room = sum(shares) // nodes
    while room and sum(min(share, room) for share in shares) < room * nodes:  # no trial takes two shares of one node
        room -= 1
    return room


def waiting_for(search: Search) -> str:
    """Explain why no trial runs."""
    free = ray.available_resources()
    asked = " ".join(f"{name}={share:g}" for name, share in search.resources.items())
    left = " ".join(f"{name}={free.get(name, 0):g}" for name in search.resources)
    nodes = sum(node["Alive"] for node in ray.nodes())
    where = "one node" if search.nodes == 1 else f"each of {search.nodes} nodes"
    return (
        f"each needs {asked} on {where}, and {left} of {nodes} nodes are free; other jobs may use the rest, or nodes "
        "are still starting (ray status)"
    )


def require_shared(search: Search) -> None:
    """Raise UserError unless every node sees what its trials need.

    That is the object store, or without one the search's folder; and the shards, if they are in a folder.
    """
    nodes = [node for node in ray.nodes() if node["Alive"]]
    if len(nodes) == 1 and not search.store:
        return
    place, folders = search.store or str(search.folder), [search.data_root]
    if not os.path.isdir(search.data_root):  # a URL or a command reads the same everywhere
        folders.clear()
    with _marked(place) as mark:
        asked = {node["NodeManagerAddress"]: _ask(node["NodeID"], place, mark, folders) for node in nodes}
        for address, answer in asked.items():
            unseen = _answered(address, answer)
            if unseen:
                raise UserError(
                    f"node {address} does not see {' and '.join(unseen)}; give --storage and data.root on a file "
                    "system that all nodes share, or --storage s3://BUCKET/FOLDER"
                )


@contextmanager
def _marked(place: str) -> Iterator[str]:
    """Yield the name of a temporary marker file."""
    mark = f".seen-{secrets.token_hex(8)}"
    try:
        files, folder = FileSystem.from_uri(place)
        files.create_dir(folder)
        with files.open_output_stream(f"{folder}/{mark}") as file:
            file.write(b"seen")
    except (OSError, ValueError) as error:
        why = " ".join(str(error).split())[:300]
        raise UserError(f"--storage {place} cannot be written ({why}); check its address and keys") from None
    try:
        yield mark
    finally:
        files.delete_file(f"{folder}/{mark}")


def _ask(node: str, place: str, mark: str, folders: Sequence[str]) -> Any:
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    task = ray.remote(_unseen).options(num_cpus=0, max_retries=0, scheduling_strategy=there)
    return task.remote(place, mark, folders)


def _answered(address: str, answer: Any) -> list[str]:
    try:
        unseen: list[str] = ray.get(answer, timeout=ANSWER_SECONDS)
    except ray.exceptions.RayError as error:
        why = str(error).strip().splitlines()[-1][:200]
        raise UserError(
            f"node {address} cannot run trials ({why}); install this project there, as `ray up` does"
        ) from None
    return unseen


def _unseen(place: str, mark: str, folders: Sequence[str]) -> list[str]:
    """Return which of these this node does not see."""
    try:
        files, folder = FileSystem.from_uri(place)
        seen = files.get_file_info(f"{folder}/{mark}").type is FileType.File
    except (OSError, ValueError):  # keys that only other nodes have
        seen = False
    return [*([] if seen else [place]), *(folder for folder in folders if not os.path.isdir(folder))]


def resources(search: Search) -> Any:
    """Return what a trial requests from Ray."""
    share = dict(search.resources)
    if search.nodes == 1:
        return share
    return tune.PlacementGroupFactory([share] * search.nodes, strategy="STRICT_SPREAD")


@dataclass(frozen=True)
class Companions:
    """The ranks of a trial on its other nodes, and their output."""

    tasks: Mapping[Any, Path]

    def check(self) -> None:
        """Raise Failed or Refused if a node's ranks have ended with an error."""
        ended, _ = ray.wait([*self.tasks], timeout=0) if self.tasks else ((), ())
        for task in ended:
            try:
                status = ray.get(task)
            except ray.exceptions.RayError as error:
                raise training.Failed(f"a node of the trial is lost ({type(error).__name__})") from None
            if status:
                said = training.why(self.tasks[task], status)
                raise training.Refused(said) if status == EXIT_USER_ERROR else training.Failed(said)


@contextmanager
def spanned(search: Search, command: Command, log: Path) -> Iterator[tuple[Command, Companions]]:
    """Start the ranks on a trial's other nodes, yield the trial's own command, and end all of them with it."""
    if search.nodes == 1:
        yield command, Companions({})
        return
    group = Group(search.nodes, 0, ray.util.get_node_ip_address(), free_port())
    companions = Companions(
        {
            _begin(search, replace(command, group=replace(group, own=node)), own_log): own_log
            for node in range(1, search.nodes)
            for own_log in [log.with_suffix(f".node{node}.log")]
        }
    )
    try:
        yield replace(command, group=group), companions
    finally:
        for task in companions.tasks:
            ray.cancel(task, force=True)  # the guard ends the ranks with the process of the task
        ray.wait([*companions.tasks], num_returns=search.nodes - 1, timeout=training.PATIENCE_SECONDS)


def _begin(search: Search, command: Command, log: Path) -> Any:
    """Start a task in the bundle of one node."""
    place = PlacementGroupSchedulingStrategy(
        get_current_placement_group(), placement_group_bundle_index=command.group.own
    )
    named = {name: share for name, share in search.resources.items() if name not in ("CPU", "GPU")}
    return (
        ray.remote(_ranks)
        .options(
            num_cpus=search.resources.get("CPU", 0),
            num_gpus=search.resources.get("GPU", 0),
            resources=named,
            scheduling_strategy=place,
            max_retries=0,
        )
        .remote(command, log)
    )


def _ranks(command: Command, log: Path) -> int:
    """Run the ranks of this node to their end and return their exit status."""
    with training.launched(command, log) as process:
        return process.wait()
