"""One trial: the trainer itself, started as DeepSpeed's launcher does and observed through its run folder.

It runs the same script and code path as `deepspeed trainers/adv_train.py ...`. The `deepspeed` command in front of the
launcher is left out: it forwards no signal on one node, so that ranks would outlive their trial. A single rank needs no
launcher, whose imports take as long as the trainer's own; it gets the launcher's variables here.
"""

import base64
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from certizoo.documents import read_json
from certizoo.errors import EXIT_USER_ERROR
from certizoo.files import write_whole
from certizoo.ports import free_port
from certizoo.processes import end_group, ending
from certizoo.registry.tracking.run_folder import ROWS, STATE
from trainers.job import checkpoint
from tuning import guard

Row = dict[str, float]
CERTIFICATE = "certificate/certificate.json"
RESULTS = ("handover", "certificate")  # folders of a run that has ended
POLL_SECONDS, PATIENCE_SECONDS = 0.2, 20.0
GUARD = (sys.executable, "-I", "-S", guard.__file__)
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "CROSS_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1", "CROSS_SIZE": "1"}
OF_ANOTHER_GROUP = {*ALONE, "MASTER_ADDR", "MASTER_PORT"}


class Failed(Exception):
    """The trainer ended without a certificate; the message says why."""


class Refused(Failed):
    """The trainer refused its configuration: retrying changes nothing."""


@dataclass(frozen=True)
class Group:
    """The nodes of a trial's ranks: their number, the index of this one, and the address of the first."""

    nodes: int = 1
    own: int = 0
    address: str = "127.0.0.1"
    port: int = 0  # 0: any free port


@dataclass(frozen=True)
class Command:
    """The trainer's command on one node, with its number of ranks there.

    `variables` join its environment: they hold what no command line may show.
    """

    script: Path
    overrides: Sequence[str]
    ranks: int
    variables: Mapping[str, str] = field(default_factory=dict, repr=False)
    group: Group = Group()


@dataclass(frozen=True)
class Progress:
    """An evaluation of the trial and the checkpoint that was written after it."""

    row: Row
    checkpoint: Path


def train(command: Command, run_dir: Path, log: Path, check: Callable[[], None]) -> Iterator[Progress]:
    """Run the trainer to its end; yield each new evaluation once its checkpoint exists.

    Closing the generator ends every process of the trial on this node. Raises Failed or Refused with the trainer's own
    words, and anything that `check` raises meanwhile.
    """
    adopted = progress(run_dir)
    told = adopted.row["step"] if adopted else 0.0
    with launched(command, log) as process:
        while process.poll() is None:
            time.sleep(POLL_SECONDS)
            check()
            now = progress(run_dir)
            if now and now.row["step"] > told:
                told = now.row["step"]
                yield now
    if process.returncode or not (run_dir / CERTIFICATE).is_file():
        reason = why(log, process.returncode)
        raise Refused(reason) if process.returncode == EXIT_USER_ERROR else Failed(reason)


def certificate(run_dir: Path) -> dict[str, Any]:
    """Return the certificate of a finished trial."""
    content: dict[str, Any] = read_json(run_dir / CERTIFICATE)
    return content


@contextmanager
def launched(command: Command, log: Path) -> "Iterator[subprocess.Popen[bytes]]":
    """Start the trainer's ranks in their own process group; end the whole group at exit.

    The kernel also ends it if this process is killed.
    """
    only = command.ranks == command.group.nodes == 1
    words, variables = alone(command) if only else by_launcher(command)
    own = {key: value for key, value in os.environ.items() if key not in OF_ANOTHER_GROUP}
    environment = {"OMP_NUM_THREADS": "1", **own, **variables, **command.variables}
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
        process = subprocess.Popen(
            [*GUARD, *words], cwd=log.parent, env=environment, stdout=out, stderr=subprocess.STDOUT,
            start_new_session=True, preexec_fn=guard.end_with_parent,
        )  # fmt: skip
        try:
            yield process
        finally:
            end_group(process, PATIENCE_SECONDS)


def by_launcher(command: Command) -> tuple[list[str], dict[str, str]]:
    """Return (words, environment) of DeepSpeed's launcher, which starts, numbers and ends the ranks."""
    group = command.group
    # Only the number of the other nodes' ranks matters
    hosts = {f"node{node}": slots(command.ranks) for node in range(group.nodes)}
    world = base64.urlsafe_b64encode(json.dumps(hosts).encode()).decode()
    words = [sys.executable, "-u", "-m", "deepspeed.launcher.launch", f"--world_info={world}"]
    words += [f"--node_rank={group.own}", f"--master_addr={group.address}"]
    words += [f"--master_port={group.port or free_port()}", str(command.script), *command.overrides]
    return words, {}


def alone(command: Command) -> tuple[list[str], dict[str, str]]:
    """Return (words, environment) of a single rank as the launcher would start it; a second guard ends it."""
    words = [*GUARD, sys.executable, "-u", str(command.script), "--local_rank=0", *command.overrides]
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return words, {**ALONE, **group, "CUDA_VISIBLE_DEVICES": slots(1)[0]}


def slots(ranks: int) -> list[str]:
    """Return the names of the ranks' devices: the GPUs that Ray assigned to this trial, else numbers."""
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return gpus[:ranks] if len(gpus) >= ranks and gpus[0] else [str(rank) for rank in range(ranks)]


def progress(run_dir: Path) -> Progress | None:
    """Return the newest evaluation that has its checkpoint."""
    marks = sorted((run_dir / "checkpoints").glob(f"step*/{checkpoint.MARK}"), reverse=True)
    if not marks:
        return None
    tag = marks[0].parent.name
    rows = [row for row in evaluations(run_dir) if checkpoint.tag(int(row["step"])) == tag]
    return Progress(rows[-1], marks[0].parent) if rows else None


def evaluations(run_dir: Path) -> list[Row]:
    """Return the rows of metrics.jsonl with accuracies."""
    return [row for row in _rows(run_dir) if "clean_acc" in row]


def latest(run_dir: Path) -> Row:
    """Return the newest value of each figure in metrics.jsonl."""
    return {key: value for row in _rows(run_dir) for key, value in row.items()}


def _rows(run_dir: Path) -> Iterator[Row]:
    """Iterate over the complete rows; skip a line that is being written."""
    with suppress(FileNotFoundError):
        for line in (run_dir / ROWS).read_text().splitlines():
            with suppress(ValueError):
                yield json.loads(line)


def snapshot(found: Progress, run_dir: Path, to: Path, results: Sequence[str] = ()) -> Path:
    """Link the checkpoint, the rows so far and these folders of the run into `to`, with its place in MLflow.

    Links keep the files even if the trainer deletes its own while this is copied.
    """
    shutil.copytree(found.checkpoint, to / "checkpoints" / found.checkpoint.name, copy_function=os.link)
    for name in results:
        shutil.copytree(run_dir / name, to / name, copy_function=os.link)
    for path in (run_dir / STATE, run_dir / ROWS):  # in this order: the state counts the rows that were sent
        if path.is_file():
            shutil.copyfile(path, to / path.name)
    return to


def adopt(snapshot_dir: Path, run_dir: Path, changed: dict[str, Any]) -> None:
    """Start a run folder from a snapshot, so that `resume=auto` continues from it.

    The run continues as a run of its own, without the results of an ended one.

    Args:
        snapshot_dir: the snapshot.
        run_dir: the new run folder.
        changed: keys that the search has changed since (population-based training). They are written to the
            checkpoint's fingerprint; any other difference is still refused. It is then another run for MLflow, too.
    """
    shutil.copytree(snapshot_dir, run_dir, dirs_exist_ok=True, ignore=lambda _, names: {*names} & {*RESULTS})
    for mark in run_dir.glob(f"checkpoints/*/{checkpoint.MARK}"):
        content = read_json(mark)
        if any(content["fingerprint"].get(key) != value for key, value in changed.items()):
            content["fingerprint"] |= changed
            (run_dir / STATE).unlink(missing_ok=True)
        write_whole(mark, json.dumps(content))


def why(log: Path, status: int) -> str:
    """Return the trainer's own error line, else the last line of its log."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    said = [line for line in lines if line.startswith("error: ")]
    ours = [line for line in lines if "launch.py" not in line and not line.startswith("_rank_mapping")]
    reason = (said or ours or ["it said nothing"])[-1].removeprefix("error: ")
    return f"{reason} ({ending(status)}; {log})"
