"""The site, built once for all tests that read it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools.launching import ROOT

QUICK = "*_digits"  # models of the zoo's table; building all of them takes a minute


def built(folder: Path, models: str) -> Path:
    """Run `mkdocs build --strict` into `folder`.

    Raises AssertionError with the output if it fails.
    """
    surroundings = os.environ | {"CERTIZOO_DOCS_MODELS": models, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=surroundings, text=True, capture_output=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the site, built with a short table of the zoo."""
    return built(tmp_path_factory.mktemp("built") / "site", QUICK)
