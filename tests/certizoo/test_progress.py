"""Progress in a log file: plain lines, not too often, with the rate and the time left."""

import io
import time

import pytest
from rich.console import Console

from certizoo.progress import ProgressLines, Pulse, progress_bar


def console() -> Console:
    return Console(file=io.StringIO(), force_terminal=False, width=40)


def printed(console: Console) -> list[str]:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_lines_come_at_most_every_ten_seconds() -> None:
    now, log = [0.0], console()
    report = ProgressLines("certifying", log, lambda: now[0])
    for done in range(20, 100, 10):  # 4 s apart, and 20 of them from an earlier run
        report(done, 100)
        now[0] += 4
    assert printed(log) == [
        "certifying 20/100",
        "certifying 50/100, 2.5/s, 20 s left",
        "certifying 80/100, 2.5/s, 8 s left",
    ]


def test_the_first_line_comes_before_the_first_slow_batch() -> None:
    log = console()
    ProgressLines("certifying", log)(8, 100)
    assert printed(log) == ["certifying 8/100"]


def test_a_slow_piece_gets_a_line_every_minute() -> None:
    now, log = [0.0], console()
    report = ProgressLines("certifying", log, lambda: now[0])
    report.wait()  # before the first report there is nothing to say
    report(8, 100)
    for now[0] in (50.0, 70.0, 120.0, 140.0):
        report.wait()
    now[0] = 150.0
    report(10, 100)
    assert printed(log) == [
        "certifying 8/100",
        "certifying 8/100, 70 s at work on the next",
        "certifying 8/100, 140 s at work on the next",
        "certifying 10/100, 0.0133/s, 6750 s left",
    ]


def test_lines_go_on_while_the_block_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("certizoo.progress.WAIT_SECONDS", 0.01)
    log = console()
    with progress_bar("certifying", log) as progress:
        progress(0, 2)
        end = time.monotonic() + 10
        while len(printed(log)) < 3 and time.monotonic() < end:
            time.sleep(0.01)
    lines = printed(log)
    assert lines[0] == "certifying 0/2"
    assert lines[1].startswith("certifying 0/2, ")
    assert lines[1].endswith(" s at work on the next")
    time.sleep(0.05)
    assert printed(log) == lines


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
