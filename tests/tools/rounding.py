"""Tables of rows that were computed in batches of other sizes: equal up to what rounding decides."""

import numpy as np
import pandas as pd

TURNED = 1  # decisions of a column: where one lies within rounding of its boundary either answer is right


def assert_same_to_rounding(table: pd.DataFrame, other: pd.DataFrame, rtol: float) -> None:
    """Numbers to `rtol` (a number that is there in one only is a decision too), decisions alike but for TURNED."""
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
