"""Required and tested versions of libraries and their purpose, from pyproject.toml and constraints.txt.

The purpose is in comments, which TOML's own reader drops, so lists of requirements are read line by line.
"""

import re
import tomllib
from typing import Any

from docs import ROOT
from docs.generate.tables import cell, code, table

REQUIREMENT = re.compile(r'^\s*"([A-Za-z0-9._-]+)(\[[\w,]+\])?([^"]*)",?\s*(?:#\s*(.*))?$')
SECTION = re.compile(r"^(\w+) = \[\s*(?:#.*)?$")
ONE_LINE = re.compile(r"^(\w+) = \[(.+)\]\s*(?:#\s*(.*))?$")


def markdown() -> str:
    """Return a table of required libraries, one per extra, and everything installed in the tests."""
    tested, project = pins(), _project()
    parts = [f"Python {project['requires-python']}.\n", _table("dependencies", tested)]
    parts += [f"## Extra `{name}`\n\n{_table(name, tested)}" for name in project["optional-dependencies"]]
    everything = table(("library", "version"), [(code(name), version) for name, version in sorted(tested.items())])
    return "\n".join(parts) + f"\n## Everything that the tests run with\n\n{everything}"


def pins() -> dict[str, str]:
    """Return library -> version from constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))


def requirements(section: str) -> list[tuple[str, str, str]]:
    """Return (library, required version, purpose) of a list in pyproject.toml."""
    found, inside = [], False
    for line in (ROOT / "pyproject.toml").read_text().splitlines():
        if one := ONE_LINE.match(line):
            if one[1] == section:
                listed = re.findall(r'"([\w.-]+)(?:\[[\w,]+\])?([^"]*)"', one[2])
                return [(name, asked, one[3] or "") for name, asked in listed]
        elif SECTION.match(line):
            inside = line.startswith(f"{section} =")
        elif line.startswith("]"):
            inside = False
        elif inside and (item := REQUIREMENT.match(line)):
            found.append((item[1] + (item[2] or ""), item[3], item[4] or ""))
    return found


def _table(section: str, tested: dict[str, str]) -> str:
    plain = {name.lower().replace("_", "-"): version for name, version in tested.items()}
    rows = [
        (code(name), code(asked), plain.get(name.partition("[")[0].lower().replace("_", "-"), "-"), cell(why))
        for name, asked, why in requirements(section)
    ]
    return table(("library", "asked for", "tested with", "what for"), rows)


def _project() -> dict[str, Any]:
    return dict(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"])
