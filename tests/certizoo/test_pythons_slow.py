"""Newer Pythons that are installed here parse the code without a warning and have all that it takes from their library.

They are tried without the project's dependencies. GitHub's workflow runs the whole gate with each (.github/workflows).
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools.folders import FILES
from tests.tools.launching import ROOT

pytestmark = pytest.mark.slow
VERSIONS = ("3.12", "3.13", "3.14")
LOOK = """
import ast, importlib, json, sys, warnings
warnings.simplefilter("error")
missing = []
def there(module, name):
    try:
        return hasattr(importlib.import_module(module), name or "__name__") or there(f"{module}.{name}", None)
    except ImportError:
        return False
for file in json.load(sys.stdin):
    with open(file, encoding="utf-8") as source:
        text = source.read()
    compile(text, file, "exec")
    for node in ast.walk(ast.parse(text)):
        names = [(alias.name, None) for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [(node.module, alias.name) for alias in node.names]
        for module, name in names:
            if module.partition(".")[0] not in sys.stdlib_module_names | set(sys.argv[1:]):
                continue
            if not there(module, name):
                missing.append(f"{file}: {module}{name and '.' + name or ''}")
print(json.dumps([sys.version_info[:2], missing]))
"""


def interpreter(version: str) -> str | None:
    """Return a Python of this version, of the path or of pyenv."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = [*sorted(root.glob(f"{version}.*/bin/python")), shutil.which(f"python{version}")]
    return next((str(path) for path in found if path), None)


def looked(python: str, files: list[str], *needed: str) -> list[list[str]]:
    done = subprocess.run(
        [python, "-I", "-c", LOOK, *needed], input=json.dumps(files), text=True, capture_output=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout))


@pytest.mark.parametrize("version", VERSIONS)
def test_the_code_is_parsed_and_the_library_has_its_names(version: str) -> None:
    if (python := interpreter(version)) is None:
        pytest.skip(f"no Python {version} is installed here")
    found, missing = looked(python, [str(ROOT / file) for file in FILES])
    assert ".".join(map(str, found)) == version
    assert missing == []


def test_a_name_that_is_not_there_is_found(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text("from os import nothing_of_this_name\nimport xml.no_such_part\nimport zzz_gone\n")
    _, missing = looked(sys.executable, [str(file)], "zzz_gone")
    assert [fault.partition(": ")[2] for fault in missing] == [
        "os.nothing_of_this_name", "xml.no_such_part", "zzz_gone",
    ]  # fmt: skip
