"""Progress in a log file: plain lines, not too often, with the rate and the time left."""

import io
from collections.abc import Iterator

import pytest
from rich.console import Console

from certizoo.progress import Pulse, progress_bar, progress_lines


def console() -> Console:
    return Console(file=io.StringIO(), force_terminal=False, width=40)


def printed(console: Console) -> list[str]:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_lines_come_at_most_every_ten_seconds() -> None:
    seconds: Iterator[float] = iter(range(0, 1000, 4))
    log = console()
    report = progress_lines("certifying", log, lambda: next(seconds))
    for done in range(20, 100, 10):  # 4 s apart, and 20 of them from an earlier run
        report(done, 100)
    assert printed(log) == [
        "certifying 20/100",
        "certifying 50/100, 2.5/s, 20 s left",
        "certifying 80/100, 2.5/s, 8 s left",
    ]


def test_the_first_line_comes_before_the_first_slow_batch() -> None:
    log = console()
    progress_lines("certifying", log)(8, 100)
    assert printed(log) == ["certifying 8/100"]


def test_a_pulse_is_due_after_ten_silent_seconds() -> None:
    now = [0.0]
    pulse = Pulse(lambda: now[0])
    due = []
    for now[0] in (5.0, 10.0, 15.0, 25.0):
        due.append(pulse.due)
        if now[0] == 10:
            pulse.printed()
    assert due == [False, True, False, True]


def test_a_file_gets_lines_and_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("certizoo.progress.LINE_SECONDS", 0.0)
    log = console()
    with progress_bar("certifying", log) as progress:
        progress(1, 2)
    assert printed(log) == ["certifying 1/2"]
