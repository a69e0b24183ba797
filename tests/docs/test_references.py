"""References in the code resolve: every anchor exists, every proof is named, nothing is cited by a bare number."""

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SUFFIXES = {".py", ".yaml", ".yml", ".md"}
OUTPUT = {"build", "mlruns", "node_modules", "runs", "site"}  # output of commands
# Anchors of docs/proofs.md that need no reference, each with its reason.
UNNAMED = {"notation": "the letters of all sections"}
# Documents and numbers that a reader does not have; tests may name the folder of real images.
UNREADABLE = re.compile(
    r"\b[Pp]apers? 00\d|\b[Tt]raps? [A-E]\d|\b[Ee]rrat(?:a|um)[ _][Dd]\d|MATH[-]PROOFS|MATH[.]md|\bTRAP[S]\b"
    r"|\bpeers[.]md|\(D\d+[a-z]?\)|\.\./shared(?!/data\b)"
)
ANCHOR = re.compile(r'<a id="([^"]+)"></a>')
NAMED = re.compile(r"docs/([a-z_-]+\.md)#([\w-]+)")
LINK = re.compile(r"\]\(([\w./-]*)#([^)\s]+)\)")


@cache
def texts() -> dict[str, str]:
    """Return every file of the project that people read, by its path."""
    found = {}
    for path in sorted(ROOT.rglob("*")):
        parts = path.relative_to(ROOT).parts
        if path.suffix in SUFFIXES and not any(part.startswith(".") or part in OUTPUT for part in parts):
            found["/".join(parts)] = path.read_text()
    return found


@cache
def anchors(name: str) -> frozenset[str]:
    """Return the anchors of a Markdown file: explicit ones, and those of its headings as GitHub makes them."""
    text = texts()[name]
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
    return frozenset(ANCHOR.findall(text)) | slugs


def references() -> list[tuple[str, str, str]]:
    """Return (file, Markdown file, anchor) for every named anchor: by path in code, by link in Markdown."""
    found = []
    for name, text in texts().items():
        found += [(name, f"docs/{file}", anchor) for file, anchor in NAMED.findall(text)]
        if name.endswith(".md"):
            for target, anchor in LINK.findall(text):
                path = (ROOT / name).parent / target if target else ROOT / name
                found.append((name, path.resolve().relative_to(ROOT).as_posix(), anchor))
    return found


def test_every_anchor_that_is_named_exists() -> None:
    missing = [
        f"{name}: {file}#{anchor}"
        for name, file, anchor in references()
        if file not in texts() or anchor not in anchors(file)
    ]
    assert not missing, "\n".join(missing)


def test_every_proof_is_named_by_code_or_by_another_section() -> None:
    """An unnamed proof proves nothing that is used."""
    named = {anchor for _, file, anchor in references() if file == "docs/proofs.md"}
    written = ANCHOR.findall(texts()["docs/proofs.md"])
    assert len(written) == len(set(written))
    assert sorted(set(written) - named) == sorted(UNNAMED)


def test_code_names_most_proofs_itself() -> None:
    """A reader can go from a rule straight to its proof."""
    named = {anchor for name, file, anchor in references() if file == "docs/proofs.md" and name.endswith(".py")}
    written = set(ANCHOR.findall(texts()["docs/proofs.md"]))
    assert sorted(written - named - set(UNNAMED)) == []


@pytest.mark.parametrize("name", ["docs/proofs.md", "docs/references.md"])
def test_anchors_are_written_once(name: str) -> None:
    written = ANCHOR.findall(texts()[name])
    assert written
    assert len(written) == len(set(written))


def test_nothing_is_cited_that_cannot_be_opened() -> None:
    found = [
        f"{name}:{number}: {line.strip()[:100]}"
        for name, text in texts().items()
        for number, line in enumerate(text.splitlines(), start=1)
        if UNREADABLE.search(line)
    ]
    assert not found, "\n".join(found)


def test_paths_of_the_workflows_exist() -> None:
    """Words with a slash or a suffix, but for the actions of others and commands that they install."""
    for workflow in (ROOT / ".github" / "workflows").glob("*.yml"):
        words = re.findall(r"(?:^|[\s:])((?:\.?[\w-]+/)+[\w.-]+|[\w-]+\.txt)(?=[\s,}]|$)", workflow.read_text(), re.M)
        assert words
        assert not [word for word in words if not (ROOT / word).exists()]


def test_tests_that_the_errata_speak_of_exist() -> None:
    defined = {name for text in texts().values() for name in re.findall(r"^def (test_\w+)", text, re.M)}
    spoken = set(re.findall(r"`(test_\w+)`", texts()["docs/references.md"]))
    assert spoken
    assert not spoken - defined


@pytest.mark.parametrize("words", [("paper ", "004"), ("trap ", "D13"), ("errata ", "D5"), ("(D", "5)")])
def test_the_search_for_what_cannot_be_opened_finds_it(words: tuple[str, ...]) -> None:
    assert UNREADABLE.search(f"as in {''.join(words)}, which")
    assert not UNREADABLE.search("as in docs/proofs.md#lofast, with images of ../shared/data and a trap in it")
