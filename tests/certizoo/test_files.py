"""Files are whole or absent, on a disk that fills at any moment."""

import subprocess
import sys
from itertools import count
from pathlib import Path

import pandas as pd
import pytest

from certizoo import UserError
from certizoo.files import disk_errors, whole_file, write_whole
from tests.tools.full_disk import fill, full_disk

OLD, NEW = "old" * 100, "new" * 200


def write(folder: Path) -> None:
    """Write in two ways: as Python does, and as a C++ library does."""
    write_whole(folder / "a.txt", NEW)
    with whole_file(folder / "b.parquet") as part:
        pd.DataFrame({"a": range(100)}).to_parquet(part)


def failure_of(folder: Path) -> OSError | None:
    try:
        write(folder)
    except OSError as error:
        return error
    return None


@pytest.mark.parametrize("room", [0, 100, 700])
def test_a_disk_that_is_full_from_any_moment_on_leaves_whole_files(tmp_path: Path, room: int) -> None:
    for after in count():
        (tmp_path / "a.txt").write_text(OLD)
        with full_disk(tmp_path, after, room) as disk:
            failure = failure_of(tmp_path)
        if failure:
            assert Path(failure.filename).parent == tmp_path
        text = (tmp_path / "a.txt").read_text()
        assert text in (OLD, NEW)
        assert {path.name for path in tmp_path.iterdir()} <= {"a.txt", "b.parquet"}
        if (tmp_path / "b.parquet").exists():
            assert len(pd.read_parquet(tmp_path / "b.parquet")) == 100
        if not disk.full:
            assert text == NEW
            assert failure is None
            break
        (tmp_path / "b.parquet").unlink(missing_ok=True)
    assert after == len(disk.seen) == 5
    write(tmp_path)


def test_a_running_process_gets_a_full_disk(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib\nprint('ready', flush=True)\nsys.stdin.readline()\n"
        "try: pathlib.Path(sys.argv[1]).write_text('x' * 100)\nexcept OSError as error: print(error.strerror)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "file")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        fill(process.pid, 10)
        assert process.communicate("\n")[0] == "File too large\n"
    assert (tmp_path / "file").stat().st_size <= 10


def test_a_disk_error_is_one_line_with_the_file_and_the_fix(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a\.txt cannot be written or read \(File too large\); make room$"):  # noqa: SIM117
        with full_disk(tmp_path, 0), disk_errors("make room"):
            write(tmp_path)
    with pytest.raises(UserError, match=r"x/a\.txt.* \(No such file or directory\)"), disk_errors("make room"):
        write(tmp_path / "x")
