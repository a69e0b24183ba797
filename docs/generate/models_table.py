"""The table of common models, from benchmarks/results/models_cpu.json: `<!-- made at build: models -->`."""

import json
from typing import Any

from benchmarks.record import RESULTS
from docs.generate.tables import cell, code, table

FILE = RESULTS / "models_cpu.json"
HEADS = ("model", "accepted", "method", "median radius", "seconds an image", "memory, MiB", "starts of the attack")


def results() -> dict[str, dict[str, Any]]:
    """Return the measured rows by model."""
    found: dict[str, dict[str, Any]] = json.loads(FILE.read_text())["models"]
    return found


def markdown() -> str:
    """Return the table, largest radius first, with the reasons of refusals, and a line on the hardware."""
    found = json.loads(FILE.read_text())
    rows = sorted(results().items(), key=lambda item: -item[1].get("median_radius", -1.0))
    starts = sum(row.get("starts", 0) for _, row in rows)
    made = f"{code(found['command'])} on one core of {cell(found['hardware'])}: {starts:,} starts in all, most of"
    made += " them on small models; no radius was beaten."
    return f"{table(HEADS, [_row(name, row) for name, row in rows], right=HEADS[3:])}\n{made}\n"


def _row(name: str, row: dict[str, Any]) -> list[str]:
    if not row["accepted"]:
        reasons = "; ".join(dict.fromkeys(row["missing"]))
        return [cell(name), f"no: {cell(reasons)}", *[""] * (len(HEADS) - 2)]
    numbers = [f"{row[key]:.3g}" for key in ("median_radius", "image_s")]
    return [cell(name), "yes", code(row["method"]), *numbers, f"{row['memory_MiB']:,}", f"{row['starts']:,}"]
