"""The table of `python -m zoo`. It takes a minute, so that it is kept in build/ until the code of `zoo` changes; with
CERTIZOO_DOCS_MODELS=PATTERN it is of the models that fit, which is what the tests do.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from docs.generate.tables import cell, code, table

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "build" / "zoo_table.json"
NUMBERS = ("M parameters", "GMACs", "tokens")


def markdown() -> str:
    """One row a model."""
    rows = [_row(record) for record in _records(os.environ.get("CERTIZOO_DOCS_MODELS", "*"))]
    columns = ("name", "attention", "backbone", *NUMBERS, "image", "lofast", "adjoint")
    return table(columns, rows, right=NUMBERS)


def _records(pattern: str) -> list[dict[str, Any]]:
    """Of the overview's facts; kept by what they follow from."""
    digest = _digest()
    if pattern == "*" and KEPT.is_file() and (kept := json.loads(KEPT.read_text()))["of"] == digest:
        return list(kept["records"])
    from zoo.models import overview  # torch takes seconds

    records = [overview.facts(name).record() for name in overview.matching(pattern)]
    if pattern == "*":
        KEPT.parent.mkdir(exist_ok=True)
        KEPT.write_text(json.dumps({"of": digest, "records": records}))
    return records


def _digest() -> str:
    """Of the code of zoo, the names of the models, and the versions of libraries."""
    files = [*sorted((ROOT / "zoo").rglob("*.py")), ROOT / "configs" / "names.yaml", ROOT / "constraints.txt"]
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()


def _row(record: dict[str, Any]) -> tuple[str, ...]:
    provable = ["yes" if record[method] else "-" for method in ("lofast", "adjoint")]
    tokens = "-" if record["tokens"] is None else str(record["tokens"])
    sizes = f"{record['parameters'] / 1e6:.2f}", f"{record['macs'] / 1e9:.3g}", tokens
    return code(record["name"]), cell(record["attention"]), cell(record["backbone"]), *sizes, record["image"], *provable
