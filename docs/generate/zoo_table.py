"""The table of `python -m zoo`, cached in build/ until the code of `zoo` changes, because it takes a minute.

With CERTIZOO_DOCS_MODELS=PATTERN it contains the matching models only, as in the tests.
"""

import hashlib
import json
import os
from pathlib import Path

from docs.generate.tables import cell, code, table

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "build" / "zoo_table.json"


def markdown() -> str:
    """Return one row per model."""
    from zoo.models.overview import COLUMNS, NUMBERS  # torch takes seconds to import

    rows = [(code(name), *map(cell, others)) for name, *others in _rows(os.environ.get("CERTIZOO_DOCS_MODELS", "*"))]
    return table(COLUMNS, rows, right=NUMBERS)


def _rows(pattern: str) -> list[list[str]]:
    """Return the cells of the overview, cached by their inputs."""
    digest = _digest()
    if pattern == "*" and KEPT.is_file() and (kept := json.loads(KEPT.read_text()))["of"] == digest:
        return list(kept["rows"])
    from zoo.models import overview

    rows = [list(overview.summarize(name).cells()) for name in overview.matching(pattern)]
    if pattern == "*":
        KEPT.parent.mkdir(exist_ok=True)
        KEPT.write_text(json.dumps({"of": digest, "rows": rows}))
    return rows


def _digest() -> str:
    """Return a digest of zoo's code, the published weights, the libraries' versions, and this file."""
    named = (ROOT / "zoo" / "weights" / "table.yaml", Path(__file__))
    files = [*sorted((ROOT / "zoo").rglob("*.py")), *named, ROOT / "constraints.txt"]
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()
