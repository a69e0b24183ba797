"""The notebook runs from its first cell to its last in an empty folder, and is stored with what it then printed."""

from pathlib import Path

import nbformat
import pytest

import zoo
from docs.generate.notebook import PATH, executed, markdown
from tests.tools.launching import ROOT


def test_the_stored_outputs_are_of_one_run_and_name_no_machine() -> None:
    cells = [cell for cell in nbformat.read(PATH, as_version=4).cells if cell.cell_type == "code"]
    counts = [output.execution_count for cell in cells for output in cell.outputs if "execution_count" in output]
    assert counts == sorted(counts)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert all(word not in PATH.read_text() for word in (str(ROOT), str(Path.home()), "/home/", "/tmp/"))
    page = markdown()
    assert page.count("data:image/png;base64,") == 2
    assert "OK: own.json" in page
    assert "\x1b" not in page


def test_the_stored_certified_accuracies_are_those_of_the_table() -> None:
    """They were printed; a table that changed since needs another run."""
    page = markdown()
    for entry in zoo.weights.entries().values():
        assert f"{entry.name} {entry.words({'l2': 'L2'})}" in page, "run python -m docs.generate.notebook"


@pytest.mark.slow
def test_it_runs_and_prints_as_many_outputs_as_are_stored(tmp_path: Path) -> None:
    """The radii are of new random starts."""
    stored, fresh = nbformat.read(PATH, as_version=4), executed(PATH, tmp_path)
    assert (tmp_path / "own" / "certificate" / "report.html").is_file()
    for before, now in zip(stored.cells, fresh.cells, strict=True):
        kinds = [[output.output_type for output in cell.get("outputs", ())] for cell in (before, now)]
        assert kinds[0] == kinds[1], before.source
