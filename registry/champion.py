"""Which version of a model is the champion.

`champion-DATASET` is the best version on that dataset; `champion` is the version that set the newest record on
its dataset. Both move only to a version whose headline accuracy is strictly better than all others'.
"""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from registry import store

if TYPE_CHECKING:
    from mlflow import MlflowClient

CHAMPION = "champion"


def dataset_alias(dataset: str) -> str:
    return f"{CHAMPION}-{re.sub(r'[^A-Za-z0-9_-]', '_', dataset)}"


def crown(client: "MlflowClient", name: str, version: str, headline: str) -> bool:
    """Give `version` the aliases if its tag `headline` beats every other version of its dataset; of equals the earlier.

    Then it looks again: another process may have crowned a better one meanwhile, whose aliases were just taken.
    """
    scores, alias = _rivals(client, name, version, headline)
    holder = str(client.get_registered_model(name).aliases.get(alias, ""))  # of the alias until now
    if holder == version:
        return True
    if holder and _best(scores) != version:
        return False
    winner = version
    while True:
        client.set_registered_model_alias(name, alias, winner)
        client.set_registered_model_alias(name, CHAMPION, winner)
        scores, _ = _rivals(client, name, version, headline)
        if _best(scores) == winner:
            return winner == version
        winner = _best(scores)


def _best(scores: Mapping[str, float]) -> str:
    """The highest score; of equal ones the first registered, so that of two that look at each other one takes it."""
    return max(scores, key=lambda version: (scores[version], -int(version)))


def _rivals(client: "MlflowClient", name: str, version: str, headline: str) -> tuple[dict[str, float], str]:
    """The scores of all versions on the dataset of `version`, itself included, and the alias of that dataset."""
    found = store.every(client.search_model_versions, filter_string=f"name = '{name}'")
    tags = {str(v.version): v.tags for v in found}
    dataset = tags[version]["dataset"]
    return {v: score(t, headline) for v, t in tags.items() if t.get("dataset") == dataset}, dataset_alias(dataset)


def score(tags: Mapping[str, str], headline: str) -> float:
    """The headline tag as a number; -1 where it is absent or none."""
    try:
        value = float(tags.get(headline, ""))
    except ValueError:
        return -1.0
    return value if value == value else -1.0
