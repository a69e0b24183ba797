"""Worker of tests/trainers/test_full_disk_slow.py: one training, repeated with a disk that fills at each moment.

Writes a list with an entry for each moment: the training's output, and whether the same command with resume=auto then
left the hand-over of an undisturbed training. One process, a world of one rank.
"""
# ruff: noqa: E402

import json
import sys
from itertools import count
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[3])

from certizoo import UserError
from tests.tools.full_disk import full_disk
from trainers import entry
from trainers.engine import engine


def said_by(overrides: list[str]) -> str | None:
    try:
        entry.one_of_a_machine(entry.train, "adv_train", overrides)
    except UserError as error:
        return str(error)
    return None


def handover(name: str) -> bytes:
    return Path("runs", name, "handover", "model.safetensors").read_bytes()


def main() -> None:
    *overrides, room, out = sys.argv[1:]
    assert said_by([*overrides, "name=calm"]) is None
    told: list[dict[str, Any]] = []
    for after in count():
        name = f"full{after}"
        with full_disk(Path("runs", name), after, int(room)) as disk:
            said = said_by([*overrides, f"name={name}"])
        if not disk.full:
            break
        again = said_by([*overrides, f"name={name}", "resume=auto"])
        equal = again is None and handover(name) == handover("calm")
        told.append({"at": disk.seen[after], "said": said, "again": again, "equal": equal})
    Path(out).write_text(json.dumps(told))


if __name__ == "__main__":
    with engine.kept():
        main()
    engine.stop()
