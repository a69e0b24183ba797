"""Every promise of docs/security.md is attacked by an existing test, and every attack belongs to a written promise."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


def hostile_tests() -> set[tuple[str, str]]:
    """Return (file, test) for everything with the marker."""
    found = set()
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and "pytest.mark.hostile" in map(ast.unparse, node.decorator_list):
                found.add((path.relative_to(ROOT).as_posix(), node.name))
    return found


def named() -> set[tuple[str, str]]:
    return set(NAMED.findall((ROOT / "docs" / "security.md").read_text()))


def test_every_test_that_is_named_exists() -> None:
    missing = [
        f"{file}::{test}"
        for file, test in sorted(named())
        if not (ROOT / file).is_file() or (test and f"def {test}(" not in (ROOT / file).read_text())
    ]
    assert not missing
    assert named()


def test_every_attack_is_named() -> None:
    """The page names the test or its file."""
    files = {file for file, test in named() if not test}
    unnamed = {f"{file}::{test}" for file, test in hostile_tests() - named() if file not in files}
    assert not unnamed
