"""The notebook, executed: `python -m docs.generate.notebook` stores its outputs, and the site shows it as a page.

It runs from its first cell to its last in an empty folder. Printed text, results and pictures are kept; progress,
warnings and times are not.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import nbformat

from docs import ROOT

PATH = ROOT / "docs" / "notebooks" / "ten_minutes.ipynb"
PICTURE, TEXT = "image/png", "text/plain"
COLOUR = re.compile(r"\x1b\[[\d;]*m")
PROGRESS = re.compile(r"^certifying.* \d+/\d+\n", re.M)


def executed(path: Path, folder: Path) -> Any:
    """Return the notebook with its outputs, run in `folder`. Raises CellExecutionError for a cell that fails."""
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    os.environ |= {"PYTHONPATH": str(ROOT), "IPYTHONDIR": str(folder / "ipython")}  # of the kernel
    NotebookClient(
        notebook, timeout=500, kernel_name="python3", record_timing=False, resources={"metadata": {"path": str(folder)}}
    ).execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = kept(cell.outputs)
    notebook.metadata.pop("language_info", None)  # the version of Python
    return notebook


def kept(outputs: Sequence[Any]) -> list[Any]:
    """Return what a reader needs: printed text without colours and progress, and results as a picture, else as text."""
    found: list[Any] = []
    for output in outputs:
        if output.output_type == "stream" and output.name != "stdout":
            continue
        if output.output_type == "stream" or (output.output_type == "display_data" and PICTURE not in output.data):
            text = output.text if output.output_type == "stream" else output.data[TEXT]
            printed = PROGRESS.sub("", COLOUR.sub("", text))
            if found and found[-1].output_type == "stream":
                found[-1].text += printed
            elif printed.strip():
                found.append(nbformat.v4.new_output("stream", name="stdout", text=printed))
        else:
            form = PICTURE if PICTURE in output.data else TEXT
            data = {form: output.data[form]}
            found.append(nbformat.v4.new_output("execute_result", data, execution_count=output.get("execution_count")))
    return found


def markdown() -> str:
    """Return the stored notebook as Markdown without its title: text, code, outputs."""
    parts = []
    for cell in nbformat.read(PATH, as_version=4).cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source.partition("\n")[2] if cell.source.startswith("# ") else cell.source)
        else:
            parts += [f"```python\n{cell.source}\n```", *map(_shown, cell.outputs)]
    return "\n\n".join(parts) + "\n"


def _shown(output: Any) -> str:
    if output.output_type == "stream":
        return f"```text\n{output.text.rstrip()}\n```"
    if (png := output.data.get(PICTURE)) is not None:
        return f"![The picture that the cell above shows](data:image/png;base64,{''.join(png.split())})"
    return f"```text\n{output.data[TEXT]}\n```"


def main() -> None:
    with TemporaryDirectory() as folder:
        nbformat.write(executed(PATH, Path(folder)), PATH)


if __name__ == "__main__":
    main()
