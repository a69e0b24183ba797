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
    """Give `version` the aliases if its tag `headline` beats every other version of its dataset."""
    found = store.every(client.search_model_versions, filter_string=f"name = '{name}'")
    tags = {str(v.version): v.tags for v in found}
    mine = tags.pop(version)
    alias = dataset_alias(mine["dataset"])
    holder = str(client.get_registered_model(name).aliases.get(alias, ""))  # of the alias until now
    best = max((score(t, headline) for t in tags.values() if t.get("dataset") == mine["dataset"]), default=-1.0)
    if holder and score(mine, headline) <= best:
        return holder == version
    if holder == version:
        return True
    client.set_registered_model_alias(name, alias, version)
    client.set_registered_model_alias(name, CHAMPION, version)
    return True


def score(tags: Mapping[str, str], headline: str) -> float:
    """The headline tag as a number; -1 where it is absent or none."""
    try:
        value = float(tags.get(headline, ""))
    except ValueError:
        return -1.0
    return value if value == value else -1.0
