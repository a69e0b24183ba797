"""Comparison of tables of rows that were computed in batches of other sizes: equal up to rounding."""

import numpy as np
import pandas as pd

TURNED = 1  # share of decisions that rounding may turn, being at their boundary


def assert_same_to_rounding(table: pd.DataFrame, other: pd.DataFrame, rtol: float) -> None:
    """Check numbers to `rtol` and decisions up to TURNED; a missing number counts as a decision."""
    assert list(table.columns) == list(other.columns)
    assert len(table) == len(other) > 20 * TURNED
    for column in table.columns:
        one, two = table[column], other[column]
        differ = (one != two) & ~(one.isna() & two.isna())
        if one.dtype.kind == "f":
            differ = one.isna() != two.isna()
            both = one.notna() & two.notna()
            np.testing.assert_allclose(one[both], two[both], rtol=rtol, err_msg=column)
        assert differ.sum() <= TURNED, column
