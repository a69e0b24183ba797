"""A lock admits one writer at a time, whatever happens to the writers."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from certizoo import UserError
from certizoo.locks import HOLDER, LOCK, locked, sole_writer

HOLD = """
import os, sys, time
from pathlib import Path
from certizoo.locks import sole_writer
with sole_writer(Path(sys.argv[1]), "rows", "choose another folder"):
    if os.fork() == 0:  # a worker, which outlives its parent
        time.sleep(30)
        os._exit(0)
    print("held", flush=True)
    time.sleep(30)
"""


def write(folder: Path) -> None:
    with sole_writer(folder, "rows", "choose another folder"):
        pass


def held_by_another(folder: Path) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, folder], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_writer_is_told_who_the_first_is(tmp_path: Path) -> None:
    process = held_by_another(tmp_path)
    try:
        with pytest.raises(UserError, match=rf"process {process.pid} on .*; wait for it, or choose"):
            write(tmp_path)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_a_killed_writer_keeps_nothing_though_its_workers_live(tmp_path: Path) -> None:
    process = held_by_another(tmp_path)
    try:
        process.kill()  # not the process group: the forked worker stays
        process.wait()
        write(tmp_path)
    finally:
        os.killpg(process.pid, signal.SIGKILL)


def test_two_writers_within_one_process_are_kept_apart(tmp_path: Path) -> None:
    with sole_writer(tmp_path, "rows", "choose another folder"):
        for _ in range(2):  # the first still holds the lock after the refusal
            with pytest.raises(UserError, match=f"another process writes rows here .process {os.getpid()}"):
                write(tmp_path / "." / "x" / "..")
    write(tmp_path)


@pytest.mark.hostile
@pytest.mark.parametrize("name", [LOCK, HOLDER])
def test_a_link_in_the_folder_is_not_followed(name: str, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(tmp_path / "precious")
    with suppress(UserError):
        write(tmp_path / "run")
    assert (tmp_path / "precious").read_text() == "mine"


def test_a_lock_that_is_not_waited_for_is_free_again_afterwards(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    with locked(path) as first, locked(path, wait=False) as second:
        assert first
        assert not second
    with locked(path, wait=False) as third:
        assert third
