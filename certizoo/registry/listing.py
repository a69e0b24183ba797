"""The versions that `registry list` shows: the newest, or the best by a tag, without a walk over all of them.

MLflow's search chooses versions by their tags and orders them by time. It does not order them by a tag, but it orders
the logged models behind them by a metric, and the shares of a certificate are such metrics. Conditions are checked here
again; what the server can say of them only makes its answer shorter.
"""

from collections.abc import Iterator, Sequence
from itertools import chain, islice, takewhile
from typing import TYPE_CHECKING

from certizoo.registry import browse
from certizoo.registry.browse import PAGE, Aliases, Version
from certizoo.registry.select import OWN, meets, select, tags_named, texts
from certizoo.registry.server import store

if TYPE_CHECKING:
    from mlflow import MlflowClient


def listed(
    name: str | None, where: Sequence[str], sort: str | None, limit: int | None, uri: str | None
) -> tuple[list[Version], bool]:
    """Return at most `limit` versions that meet every condition, and whether there are more.

    They are the newest, or the best by `sort` (see `select`).
    """
    target, most = browse.existing(uri), None if limit is None else limit + 1
    with store.one_line(target):
        client = store.connect(target)
        aliases = browse.aliases_of(client, name, target)
        if sort is None or most is None:
            found = select(islice(_newest(client, aliases, name, where), most), sort=sort)
        else:
            found = _best(client, aliases, name, where, sort, most)
    return found[:limit], len(found) > len(found[:limit])


def _newest(client: "MlflowClient", aliases: Aliases, name: str | None, where: Sequence[str]) -> Iterator[Version]:
    """Iterate over the versions that meet every condition, the newest first."""
    return filter(meets(where), _asked(client, aliases, name, texts(where)))


def _asked(client: "MlflowClient", aliases: Aliases, name: str | None, wanted: dict[str, str]) -> Iterator[Version]:
    """Iterate over the server's answer to the conditions that it can look up."""
    if "alias" in wanted:
        held = {(model, number) for model, of in aliases.items() for a, number in of.items() if a == wanted["alias"]}
        return chain.from_iterable(
            browse.search(client, aliases, store.query(model, {}, f"version_number = {number}"), "name ASC")
            for model, number in sorted(held)
        )
    like = [
        f"tags.`{key}` LIKE '%{text}%'"
        for key, text in wanted.items()
        if key not in OWN and store.PLAIN.fullmatch(key) and store.PLAIN.fullmatch(text)
    ]
    return browse.search(client, aliases, store.query(name, {}, *like), "creation_timestamp DESC")


def _best(
    client: "MlflowClient", aliases: Aliases, name: str | None, where: Sequence[str], sort: str, most: int
) -> list[Version]:
    """Return the `most` best versions: by the server if the key is a metric and enough versions have it."""
    newest = _newest(client, aliases, name, where)
    page = list(islice(newest, max(most, PAGE)))
    tags = tags_named(sort, page)
    if len(page) >= max(most, PAGE) and len(tags) == 1:
        found = list(islice(filter(meets(where), _by_metric(client, aliases, name, tags.pop())), most))
        if len(found) == most:
            return select(found, sort=sort)
    return select(chain(page, newest), sort=sort)[:most]


def _by_metric(client: "MlflowClient", aliases: Aliases, name: str | None, metric: str) -> Iterator[Version]:
    """Iterate over the versions whose logged models have the metric, the largest first."""
    from mlflow.entities import ViewType

    experiments = [e.experiment_id for e in store.every(client.search_experiments, view_type=ViewType.ALL)]
    models = store.every(
        client.search_logged_models,
        experiment_ids=experiments,
        filter_string=name and store.query(name),
        order_by=[{"field_name": f"metrics.{metric}", "ascending": False}],
        max_results=PAGE,
    )
    measured = takewhile(lambda model: any(value.key == metric for value in model.metrics or ()), models)
    for some in iter(lambda: list(islice(measured, PAGE)), []):
        runs = ", ".join(f"'{model.source_run_id}'" for model in some)
        found = store.every(client.search_model_versions, filter_string=f"run_id IN ({runs})")
        of_model: dict[str | None, list[Version]] = {}
        for v in found:
            of_model.setdefault(browse.logged_model_id(v), []).extend(browse.known([v], aliases))
        yield from chain.from_iterable(of_model.get(model.model_id, []) for model in some)
