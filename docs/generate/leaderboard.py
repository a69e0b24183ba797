"""The leaderboard's page: one ranking for each data set and norm, and the background of every entry."""

import csv
import io
import json
import re

from certify.stage.report.html import el
from certizoo.norms import NAMES as NORMS
from docs.generate import board_chart, board_table
from docs.generate.entries import Entry, Question, entries, eps_name, questions, share, simple
from docs.generate.tables import cell, code, table

NONE = "There are no entries yet.\n"
FILTERS = """\
<form class="filters" hidden>
<label>Data set <select name="dataset"><option value="">all</option>{datasets}</select></label>
<label>Norm <select name="norm"><option value="">all</option>{norms}</select></label>
<label class="phone">Sort by <select name="sort"></select></label>
<label><input type="checkbox" name="attention"> with attention</label>
<label><input type="checkbox" name="sound"> sound</label>
<output></output>
</form>
"""


def markdown() -> str:
    """Return filters, a chart and a table for each question, and the background of each entry."""
    asked = questions(entries())
    if not asked:
        return NONE
    background = ["## What stands behind each entry\n", *map(_details, entries())]
    return "\n".join([_filters(asked), *map(_board, asked), *background])


def first_chart() -> str:
    """Return the chart of the first question, for the start page."""
    return next((chart for question in questions(entries()) if (chart := board_chart.html(question))), "")


def files() -> dict[str, str]:
    """Return all entries as one JSON file, and all points as CSV, by their path in the site."""
    said = [dict(entry.said) for entry in entries()]
    return {"leaderboard/entries.json": json.dumps(said, indent=1) + "\n", "leaderboard/points.csv": _csv()}


COLUMNS = (
    "name", "dataset", "images", "clean", "year", "paper", "source", "extra_data", "attention", "sound", "published",
)  # fmt: skip


def _csv() -> str:
    """Return a row for each entry, norm and radius."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*COLUMNS, "norm", "eps", "certified", "attacked", "attack"])
    for entry in entries():
        for norm in NORMS:
            for point in entry.curve(norm):
                own = [entry.text(column) for column in COLUMNS]
                writer.writerow([*own, norm, point.eps, point.certified, point.attacked, point.attack])
    return out.getvalue()


def _filters(asked: list[Question]) -> str:
    datasets = {simple(question.dataset): question.title.rpartition(", ")[0] for question in asked}
    norms = {question.norm: NORMS[question.norm] for question in asked}
    return FILTERS.format(datasets=_options(datasets), norms=_options(norms))


def _options(names: dict[str, str]) -> str:
    return "".join(board_table.as_text(el("option", name, value=value)) for value, name in names.items())


def _board(question: Question) -> str:
    return (
        f'<div class="question" data-dataset="{simple(question.dataset)}" data-norm="{question.norm}" markdown>\n\n'
        f"## {cell(question.title)} {{#{question.place}}}\n\n"
        f"{board_chart.html(question)}\n\n{board_table.html(question)}\n\n</div>\n"
    )


def _function(served_dtype: str) -> str:
    """Describe the certified function."""
    if served_dtype:
        return f"the model as served in {served_dtype}, rounding included"
    return "the float64 function of the served weights"


def _details(entry: Entry) -> str:
    extra = {"True": "yes", "False": "no"}.get(entry.text("extra_data"), "")
    lines = {
        "published": cell("as published, not run here") if entry.published else "",
        "certified / attacked": "; ".join(_curve(entry, norm) for norm in NORMS if entry.curve(norm)),
        "method": cell(entry.text("method")),
        "certified function": "" if entry.published else cell(_function(entry.text("served_dtype"))),
        "numerics": cell(entry.text("numerics")),
        "training": cell(entry.text("training")),
        "generated or extra data": extra,
        "parameters": f"{int(entry.said['parameters']):,}" if entry.said.get("parameters") else "",
        "soundness": cell(entry.text("soundness")),
        "source": _source(entry.text("source")),
        "weights, sha256": code(entry.text("weights_sha256")),
        "made by": code(entry.text("command")),
        "checked by": "" if entry.published else code(board_table.command(entry)),
    }
    rows = [(key, value) for key, value in lines.items() if value]
    head = f"### {code(entry.name)} {{#{entry.place}}}\n\n{cell(entry.text('title'))}\n\n"
    return head + table(("", ""), rows)


def _curve(entry: Entry, norm: str) -> str:
    points = [
        f"{eps_name(p.eps)}: {share(p.certified)} / {share(p.attacked)}{f' ({cell(p.attack)})' if p.attack else ''}"
        for p in entry.curve(norm)
    ]
    return f"{NORMS[norm]} {', '.join(points)}"


def _source(text: str) -> str:
    """Return a link if the text is one."""
    return f"<{text}>" if re.fullmatch(r"https?://[^\s<>\"'`]+", text) else cell(text)
