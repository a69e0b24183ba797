"""Messages printed for the person who typed a command."""

import subprocess
import sys

import pytest

PROGRAM = """
from certizoo.errors import UserError, one_line_errors
@one_line_errors
def main():
    {body}
main()
"""


def run(body: str, after: str) -> "subprocess.CompletedProcess[str]":
    command = f'set -o pipefail; "$0" -c "$1" {after}'
    program = PROGRAM.format(body=body)
    return subprocess.run(["bash", "-c", command, sys.executable, program], text=True, capture_output=True, timeout=60)


def test_a_user_error_is_a_line() -> None:
    done = run("raise UserError('it is\\nwrong')", "")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "error: it is wrong\n")


@pytest.mark.parametrize("body", ["[print(i, flush=True) for i in range(10**6)]", "print('x' * 10**6)"])
def test_a_reader_that_leaves_is_no_error(body: str) -> None:
    done = run(body, "| head -c 10")
    assert (done.returncode, done.stderr) == (141, "")


def test_another_broken_pipe_is_one() -> None:
    done = run("import os; r, w = os.pipe(); os.close(r); os.write(w, b'x')", "| cat")
    assert done.returncode == 1
    assert "BrokenPipeError" in done.stderr
