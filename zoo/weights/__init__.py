"""Weights by the name of their model: a table (table.yaml), hand-overs in the package, and fetched files.

`zoo.create_model(NAME, pretrained=True)` and `python -m certify model=NAME` use this package. To add a model, add an
entry to the table and, where `source` is `package`, its hand-over in the folder of its name.
"""

from zoo.weights.table import Entry, entries, entry, handover_of

__all__ = ["Entry", "entries", "entry", "handover_of"]
