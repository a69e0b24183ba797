"""The cost of a certificate: which model, how long, how much memory, from benchmarks/results/weights_cpu.json."""

import json

import zoo
from benchmarks.record import RESULTS
from docs.generate.tables import cell, code, table

FILE = RESULTS / "weights_cpu.json"
BATCHED = "seconds an image by `best`, as certified"
HEADS = ("model", "data", "M parameters", "certified, %", "method", "seconds", "MiB", BATCHED)


def markdown() -> str:
    """Return the table, a row for each model and method, and a line on the hardware."""
    found = json.loads(FILE.read_text())
    rows = []
    for pair, row in found["pairs"].items():
        name, method = pair.split()
        entry = zoo.weights.entries()[name]
        numbers = [f"{row['image_s']:.2g}", str(row["memory_MiB"])]
        size = f"{row['parameters'] / 1e6:.2g}"
        certified = json.loads((RESULTS / f"{name}_{entry.dataset}_best.json").read_text())
        numbers.append(f"{certified['seconds_per_image']:.2g}")
        rows.append([code(name), cell(entry.dataset), size, entry.headline, code(method), *numbers])
    made = f"{code(found['command'])} on one core of {cell(found['hardware'])}."
    return f"{table(HEADS, rows, right=(*HEADS[2:4], *HEADS[5:]))}\n{made}\n"
