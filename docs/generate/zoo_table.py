"""The table of `python -m zoo`.

With CERTIZOO_DOCS_MODELS=PATTERN it contains the matching models only, as in the tests.
"""

import os

from docs.generate.tables import cell, code, table


def markdown() -> str:
    """Return one row per model."""
    from zoo.models import overview  # torch takes seconds to import

    found = map(overview.summary, overview.matching(os.environ.get("CERTIZOO_DOCS_MODELS", "*")))
    rows = [(code(name), *map(cell, others)) for name, *others in (row.cells() for row in found)]
    return table(overview.COLUMNS, rows, right=overview.NUMBERS)
