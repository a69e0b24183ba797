"""The table of `python -m zoo`. It takes a minute, so that it is kept in build/ until the code of `zoo` changes; with
CERTIZOO_DOCS_MODELS=PATTERN it is of the models that fit, which is what the tests do.
"""

import hashlib
import json
import os
from pathlib import Path

from docs.generate.tables import cell, code, table

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "build" / "zoo_table.json"


def markdown() -> str:
    """One row a model."""
    from zoo.models.overview import COLUMNS, NUMBERS  # torch takes seconds

    rows = [(code(name), *map(cell, others)) for name, *others in _rows(os.environ.get("CERTIZOO_DOCS_MODELS", "*"))]
    return table(COLUMNS, rows, right=NUMBERS)


def _rows(pattern: str) -> list[list[str]]:
    """The cells of the overview; kept by what they follow from."""
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
    """Of the code of zoo, what has weights, the names of the models, the versions of libraries, and this file."""
    named = (ROOT / "zoo" / "weights" / "table.yaml", Path(__file__))
    files = [*sorted((ROOT / "zoo").rglob("*.py")), *named, ROOT / "configs" / "names.yaml", ROOT / "constraints.txt"]
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()
