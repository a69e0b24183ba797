"""Weights by the name of their model: a table (table.yaml), the hand-overs in the package, the rest fetched.

`zoo.create_model(NAME, pretrained=True)` and `python -m certify model=NAME` ask here. A model more is an entry in the
table, and, where `source` is `package`, its hand-over in the folder of its name.
"""

from zoo.weights.table import Entry, entries, entry, handover_of

__all__ = ["Entry", "entries", "entry", "handover_of"]
