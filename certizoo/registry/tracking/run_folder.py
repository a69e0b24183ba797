"""The files of a run folder from which MLflow gets the run: all that it shows can be sent from here, and sent again.

    config.yaml             parameters
    metrics.jsonl           one row of metrics a line, with its `step` and `time` (milliseconds since 1970)
    handover/, pictures/    sent once the run has finished
    mlflow.json             the run in MLflow, how far its rows were sent, and how it ended: `Tracked`
    publish.json            a version that waits to be registered (publish.py)

A run folder may come from someone else. No file is read or written through a link, sizes are bounded, and content is
checked before it is used.
"""

import json
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from certizoo import UserError
from certizoo.documents import read_json
from certizoo.files import no_link, write_whole
from certizoo.locks import locked
from certizoo.registry.tracking import checks
from certizoo.text import plain

CONFIG, ROWS, FOLDERS = "config.yaml", "metrics.jsonl", ("handover", "pictures")
STATE, PUBLICATION = "mlflow.json", "publish.json"
# Locks: held for a moment; by one sender; by the training as long as it lives.
CHANGING, SENDING, TRAINING = ".mlflow.lock", ".mlflow.sending.lock", ".mlflow.training.lock"
STATUSES = (None, "FINISHED", "FAILED", "KILLED")
MAX_LINE = 2**20  # bytes of a row
BATCH = 1000  # metrics of one request to MLflow


@dataclass(frozen=True)
class Tracked:
    """The content of mlflow.json. Times are milliseconds since 1970."""

    experiment: str
    run_name: str
    uri: str  # the server of the training: shown and compared, never contacted
    key: str  # names the run before MLflow has given it an id
    began: int
    session: int = 1  # number of starts; a sender records nothing about an earlier session
    run_id: str | None = None
    sent: int = 0  # bytes of metrics.jsonl that MLflow has
    status: str | None = None  # of the session's end; None while it runs, and after a kill
    ended: int = 0
    done: bool = False  # nothing is left to send


class Point(NamedTuple):
    """One value of a metric."""

    name: str
    value: float
    time: int
    step: int


def now() -> int:
    return int(time.time() * 1000)


def below(root: Path) -> list[Path]:
    """Return the run folders below `root`, including those of trials, from which something may be sent."""
    return sorted({path.parent for name in (STATE, PUBLICATION) for path in root.rglob(name)})


def begin(run_dir: Path, experiment: str, run_name: str, uri: str) -> Tracked:
    """Record the start of a session. A resume has dropped the rows that it will repeat: they are sent again."""
    new = Tracked(experiment, run_name, uri, key=uuid.uuid4().hex, began=now())
    with locked(run_dir / CHANGING):
        if old := load(run_dir):
            sent = min(old.sent, size(run_dir))
            new = replace(new, key=old.key, began=old.began, session=old.session + 1, run_id=old.run_id, sent=sent)
        _write(run_dir, new)
    return new


def update(run_dir: Path, session: int, **changes: Any) -> bool:
    """Change the state; return False, and change nothing, if the run was resumed after `session`."""
    with locked(run_dir / CHANGING):
        state = load(run_dir)
        if state is None or state.session != session:
            return False
        _write(run_dir, replace(state, **changes))
        return True


def load(run_dir: Path) -> Tracked | None:
    """Return the state of a tracked run; None for any other folder, such as a trial's snapshot, which has no config.

    Raises:
        UserError: mlflow.json is invalid, or a file is a link.
    """
    refuse_links(run_dir, STATE, f"{STATE}.part", CONFIG, ROWS)
    if not ((run_dir / STATE).is_file() and (run_dir / CONFIG).is_file()):
        return None
    try:
        return _checked(Tracked(**checks.mapping(read_json(run_dir / STATE), "the content")))
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{run_dir / STATE} is not the state of a tracked run ({error}); remove it, and all rows are sent again"
        ) from None


def refuse_links(run_dir: Path, *names: str) -> None:
    """Refuse links in place of our files: writing through them could write anywhere."""
    for name in names:
        if (run_dir / name).is_symlink():
            raise UserError(f"{run_dir / name} is a link; remove it")


def is_training(run_dir: Path) -> bool:
    """Return True while a tracker is between its start and its end, in any process."""
    with locked(run_dir / TRAINING, wait=False) as free:
        return not free


def size(run_dir: Path) -> int:
    return (run_dir / ROWS).stat().st_size if (run_dir / ROWS).is_file() else 0


def last_sign(run_dir: Path) -> int:
    """Return the time of the last row, or of the start: a killed run lived until then."""
    return int((run_dir / (ROWS if size(run_dir) else CONFIG)).stat().st_mtime * 1000)


def batches(run_dir: Path, state: Tracked) -> Iterator[tuple[list[Point], int]]:
    """Iterate over the metrics that were not sent, at least BATCH at once, each time with the new value of `sent`."""
    points: list[Point] = []
    end = given = state.sent
    for row, end in _rows(run_dir, state):
        points += row
        if len(points) >= BATCH:
            yield points, end
            points, given = [], end
    if end > given:
        yield points, end


def _rows(run_dir: Path, state: Tracked) -> Iterator[tuple[list[Point], int]]:
    """Iterate over the complete lines, each with the offset after it: the last one may still be written."""
    if size(run_dir) <= state.sent:
        return
    with open(run_dir / ROWS, "rb", opener=no_link) as file:
        file.seek(state.sent)
        while line := file.readline(MAX_LINE):
            if not line.endswith(b"\n") and len(line) < MAX_LINE:
                return
            try:
                yield _points(line), file.tell()
            except (ValueError, OverflowError, RecursionError) as error:
                raise UserError(
                    f"{run_dir / ROWS}: the line before byte {file.tell()} is not a row of metrics "
                    f"({plain(str(error))[:200]}); remove it"
                ) from None


def _points(line: bytes) -> list[Point]:
    """Return the metrics of a row."""
    row = checks.mapping(json.loads(line), "a row")
    step, at = row.pop("step", None), row.pop("time", None)
    row.pop("epoch", None)
    checks.whole(step, "step")
    checks.whole(at, "time")
    return [Point(name, checks.number(value, "a metric"), at, step) for name, value in row.items()]


def _write(run_dir: Path, state: Tracked) -> None:
    write_whole(run_dir / STATE, json.dumps(asdict(state), indent=1))


def _checked(state: Tracked) -> Tracked:
    for name in ("experiment", "run_name", "uri"):
        checks.text(getattr(state, name), name)
    for name in ("began", "session", "sent", "ended"):
        checks.whole(getattr(state, name), name)
    checks.word(state.key, "key")
    if state.run_id is not None:
        checks.word(state.run_id, "run_id")
    if state.status not in STATUSES or not isinstance(state.done, bool):
        raise ValueError("status or done is not one of its values")
    return state
