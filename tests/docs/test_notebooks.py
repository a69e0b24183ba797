"""Every notebook runs from its first cell to its last in an empty folder, and is stored without output."""

from pathlib import Path

import nbclient
import nbformat
import pytest

from tests.tools.launching import ROOT

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


@each
def test_a_notebook_holds_no_output_and_no_place(path: Path) -> None:
    """Stored outputs would be of some machine and day; the slow test makes fresh ones."""
    cells = nbformat.read(path, as_version=4).cells
    assert all(not cell.outputs and cell.execution_count is None for cell in cells if cell.cell_type == "code")
    assert all(word not in path.read_text() for word in (str(ROOT), str(Path.home()), "/home/", "/tmp/"))


@pytest.mark.slow
@each
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(
        notebook, timeout=500, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    assert (tmp_path / "own" / "certificate" / "report.html").is_file()
    said = [
        output.get("text") or output.get("data", {}).get("text/plain", "")
        for cell in notebook.cells
        for output in cell.get("outputs", ())
    ]
    assert any("OK: own.json" in text for text in said)
