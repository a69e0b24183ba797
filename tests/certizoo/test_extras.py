"""Every library is in the core, or its absence is one line with the extra that installs it."""

import ast
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from certizoo.errors import one_line_errors
from certizoo.extras import EXTRAS

ROOT = Path(__file__).parents[2]
OWN = ("certizoo", "zoo", "certify", "trainers", "tuning")
DISTRIBUTIONS = {"sklearn": "scikit-learn", "PIL": "pillow", "yaml": "pyyaml", "hydra": "hydra-core"}
# What another library of the same extra requires and what has an error of its own.
BROUGHT = {
    "aiohttp": "fsspec",
    "sqlalchemy": "mlflow",
    "annotated_types": "pydantic",
    "huggingface_hub": "timm",
    "pydantic_core": "pydantic",
}
SAID = {"auto_LiRPA", "cv2", "imagecorruptions", "onnx", "onnxscript", "simplejpeg"}


def imported() -> set[str]:
    """Return all libraries that the product imports anywhere."""
    found = set[str]()
    for path in (path for package in OWN for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {name.name.partition(".")[0] for name in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module.partition(".")[0])
    return found - set(sys.stdlib_module_names) - set(OWN)


def project() -> dict[str, Any]:
    return dict(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"])


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=,]", text)[0] for text in requirements}


def test_every_library_is_in_the_core_or_in_its_extra() -> None:
    core, extras = names(project()["dependencies"]), project()["optional-dependencies"]
    for library in imported() - SAID:
        name = BROUGHT.get(library, library)
        name = DISTRIBUTIONS.get(name, name)
        assert name in (names(extras[EXTRAS[library]]) if library in EXTRAS else core), library
    assert EXTRAS.keys() <= imported()


def test_the_absence_of_a_library_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    @one_line_errors
    def program(library: str) -> None:
        raise ModuleNotFoundError(f"No module named {library!r}", name=library)

    for library in EXTRAS:
        with pytest.raises(SystemExit):
            program(f"{library}.part")
        assert capsys.readouterr().err.endswith(f"is not installed; pip install 'certizoo[{EXTRAS[library]}]'\n")
    with pytest.raises(ModuleNotFoundError):
        program("zoo_of_others")
