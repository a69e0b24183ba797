"""A registry of thousands of versions, made by copying the rows of one published version inside SQLite."""

import sqlite3
from contextlib import closing
from pathlib import Path

from tests.tools.versions import HEADLINE

LOW = HEADLINE.replace("certified_acc", "certified_low")
# Tables that a publication writes rows to, with the columns that name the version there; the first finds its rows.
TABLES = {
    "runs": ("run_uuid",),
    "logged_models": ("model_id", "source_run_id"),
    "logged_model_tags": ("model_id",),
    "logged_model_metrics": ("model_id", "run_id"),
    "model_versions": ("version", "source", "run_id"),
    "model_version_tags": ("version",),
}


def share(more: float) -> str:
    """Return the share of a copy as an expression in SQL; no two of 3,391 versions in a row have the same."""
    return f"printf('%.4f', 0.05 + (version * 37 % 3391) / 10000.0 + {more})"


def multiply(database: Path, name: str, count: int) -> None:
    """Copy version 1 of `name` until there are `count` versions.

    Every copy has a run, a logged model, the tag `trial` and a certified share below 0.39 of its own, and is no
    champion. Other tags are the same.
    """
    with closing(sqlite3.connect(database)) as db, db:
        run_id, source = db.execute("SELECT run_id, source FROM model_versions WHERE version = 1").fetchone()
        (last,) = db.execute("SELECT max(version) FROM model_versions").fetchone()
        db.execute("CREATE TEMP TABLE copies (n INTEGER)")
        db.executemany("INSERT INTO copies VALUES (?)", [(n,) for n in range(last + 1, count + 1)])
        own = {
            "version": "copies.n",
            "run_id": "printf('%032x', copies.n)",
            "model_id": "printf('m-%032x', copies.n)",
            "source": "printf('models:/m-%032x', copies.n)",
        }
        own |= {"run_uuid": own["run_id"], "source_run_id": own["run_id"]}
        first = {"version": 1, "run_id": run_id, "model_id": source.removeprefix("models:/")}
        first |= {"run_uuid": run_id}
        for table, keys in TABLES.items():
            columns = [row[1] for row in db.execute(f"PRAGMA table_info({table})")]
            values = [own[column] if column in keys else column for column in columns]
            db.execute(
                f"INSERT INTO {table} ({', '.join(columns)}) SELECT {', '.join(values)} FROM {table}, copies "
                f"WHERE {table}.{keys[0]} = ?", (first[keys[0]],)
            )  # fmt: skip
        db.execute(f"DELETE FROM model_version_tags WHERE key = 'champion_by' AND version > {last} AND name = '{name}'")
        for key, value in {"trial": "'copy/' || version", HEADLINE: share(0), LOW: share(-0.04)}.items():
            of_copies = f"WHERE key = '{key}' AND version > {last} AND name = '{name}'"
            db.execute(f"UPDATE model_version_tags SET value = {value} {of_copies}")
        db.execute(
            "UPDATE logged_model_metrics AS m SET metric_value = CAST(t.value AS REAL) FROM model_versions AS v JOIN "
            f"model_version_tags AS t USING (name, version) WHERE t.key = '{HEADLINE}' AND v.run_id = m.run_id AND "
            f"m.metric_name = '{HEADLINE}' AND v.version > {last}"
        )
