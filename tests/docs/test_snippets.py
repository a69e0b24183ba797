"""Every command and program of the pages that readers follow runs as it is printed, in a copy of the project."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.standins import STANDINS
from tests.tools.launching import ROOT
from tests.tools.snippets import Room, Snippet, room, snippets

OTHERS = ("README.md", *(f"docs/{name}.md" for name in ("explained/beside", "index", "results", "start", "usage")))
PAGES = sorted({*OTHERS, *(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/howto/*.md"))})


def of(page: str) -> list[Snippet]:
    return snippets(page, (ROOT / page).read_text())


WITH_FAST = [page for page in PAGES if any(snippet.speed == "fast" for snippet in of(page))]
WITH_SLOW = [page for page in PAGES if any(snippet.speed == "slow" for snippet in of(page))]


@pytest.fixture
def copy_of_the_project(tmp_path: Path) -> Iterator[Room]:
    found = room(tmp_path)
    yield found
    found.close()


@pytest.mark.parametrize("page", WITH_FAST)
def test_fast_blocks_run(page: str, copy_of_the_project: Room) -> None:
    for snippet in of(page):
        if snippet.speed != "slow":
            copy_of_the_project.run(snippet, STANDINS)


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("page", WITH_SLOW)
def test_all_blocks_run_in_their_order(page: str, copy_of_the_project: Room) -> None:
    for snippet in of(page):
        print(f"{snippet}\n{copy_of_the_project.run(snippet, STANDINS)}")


@pytest.mark.parametrize("page", PAGES)
def test_every_block_says_how_it_runs(page: str) -> None:
    """Blocks that cannot run here give a reason, and every stand-in exists."""
    for snippet in of(page):
        assert snippet.language not in ("sh", "python") or snippet.speed or snippet.file or len(snippet.reason) > 10
        assert not snippet.standin or snippet.standin in STANDINS


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("```sh\nls\n```\n", "how does it run"),
        ("<!-- runs: fast -->\n\n```sh\nls\n```\n", "how does it run"),
        ("<!-- runs: quickly -->\n```sh\nls\n```\n", "how does it run"),
        ("<!-- runs: not here: -->\n```python\n1\n```\n", "how does it run"),
        ("```bash\nls\n```\n", "a block of bash"),
        ("```\nls\n```\n", "a block of no language"),
    ],
)
def test_a_block_that_says_nothing_is_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        snippets("page.md", text)


def test_blocks_are_read_as_they_are_printed() -> None:
    text = (
        "Words.\n\n<!-- runs: slow, with x -->\n```sh\na \\\n    b\n```\n\n- item\n\n"
        "    <!-- file: f.yaml -->\n    ```yaml\n    k: 1\n    ```\n\n```text\nout\n```\n"
    )
    first, second, third = snippets("page.md", text)
    assert (first.text, first.speed, first.standin, first.line) == ("a \\\n    b\n", "slow", "x", 3)
    assert (second.text, second.file) == ("k: 1\n", "f.yaml")
    assert (third.language, third.speed) == ("text", "")


def test_a_block_that_fails_fails(tmp_path: Path) -> None:
    """A failure in the middle of a block counts too."""
    for language, text in (("sh", "false\ntrue\n"), ("python", "raise SystemExit(3)\n"), ("sh", "false | true\n")):
        with pytest.raises(AssertionError, match=r"page\.md:1 ends with"):
            Room(tmp_path).run(Snippet("page.md", 1, language, text, "fast"), {})
