"""The folders and files of the product, and what they import."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
# folder -> the project's folders that it may import besides itself and `certizoo`
FOLDERS: dict[str, set[str]] = {
    "certizoo": set(),
    "zoo": set(),
    "certify": {"zoo"},
    "trainers": {"zoo", "certify"},
    "tuning": {"zoo", "certify", "trainers"},
}


def files_of(root: Path) -> list[Path]:
    """Return every Python file of the product below `root`, relative to it."""
    return sorted(path.relative_to(root) for folder in FOLDERS for path in (root / folder).rglob("*.py"))


FILES = files_of(ROOT)


def parsed(path: Path) -> ast.Module:
    return _parsed(path.read_text())


@cache
def _parsed(text: str) -> ast.Module:
    """Parse a text once, however many copies of its file a test makes."""
    return ast.parse(text)


def imported(path: Path) -> frozenset[str]:
    """Return the dotted names of all imports in the file, inside functions and under TYPE_CHECKING too."""
    return _imported(path.read_text())


@cache
def _imported(text: str) -> frozenset[str]:
    found: set[str] = set()
    for node in ast.walk(_parsed(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{ast.unparse(node)}: relative imports hide where a thing lives"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(found)


def libraries(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in imported(path)}
