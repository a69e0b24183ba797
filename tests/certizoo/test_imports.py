"""Cheap imports: garbage collection pauses and resumes, a hidden library returns, a rank loads only what it needs."""

import subprocess
import sys
from pathlib import Path

import pytest

from certizoo.imports import absent

ROOT = Path(__file__).parents[2]

COLLECTOR = """
import gc, weakref
from certizoo.imports import large_imports

class Node: pass

def garbage():
    node = Node()
    node.itself = node
    return weakref.ref(node)

for on in (True, False):
    (gc.enable if on else gc.disable)()
    before = gc.get_freeze_count()
    try:
        with large_imports():
            assert not gc.isenabled()
            import sqlite3
            raise ImportError
    except ImportError:
        pass
    assert gc.isenabled() == on, "as it was"
    assert gc.get_freeze_count() > before or not on
    gone = garbage()
    gc.collect()
    assert gone() is None, "later garbage is found"
"""
RANK = """
import sys
from certizoo.imports import large_imports
with large_imports():
    import trainers.certvit.run, trainers.steps.loop
loaded = {name.partition(".")[0] for name in sys.modules}
print(sorted(loaded & {"mlflow", "matplotlib", "pandas", "ray", "sklearn", "hydra"}))
import mlflow
from deepspeed.autotuning import autotuner
print(mlflow.__version__ > "3", autotuner.has_mlflow)
"""


def output(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_collector_waits_during_imports_and_goes_on() -> None:
    output(COLLECTOR)


def test_an_absent_library_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "this", raising=False)
    with absent("this"), pytest.raises(ImportError):
        import this  # noqa: F401
    assert "this" not in sys.modules
    with absent("json"):
        import json
    assert json is sys.modules["json"], "what was there stays"


def test_a_rank_loads_neither_mlflow_nor_pandas_nor_matplotlib() -> None:
    """Rank 0 loads them when it first needs them.

    DeepSpeed's autotuner, which no rank runs, is the one that is told otherwise.
    """
    assert output(RANK).splitlines()[-2:] == ["['hydra']", "True False"]


WITHOUT_POSIX = """
import os, sys
import certizoo.compat, hydra, multiprocessing.util, timm, torchvision, subprocess
for name in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules[name] = None
for name in ("register_at_fork", "fork", "getuid", "sched_getaffinity", "O_NOFOLLOW"):
    delattr(os, name)
import zoo, certify, certify.__main__, certify.photos.cli, certify.stage.cli, certizoo.shards
from pathlib import Path
from certizoo.locks import sole_writer
from certizoo import UserError
folder = Path(sys.argv[1])
with sole_writer(folder, "rows", "wait"):
    try:
        with sole_writer(folder, "rows", "wait"):
            raise SystemExit("two writers")
    except UserError:
        pass
with sole_writer(folder, "rows", "wait"):
    print("locked")
"""


def test_models_and_certificates_import_without_posix_and_locks_hold(tmp_path: Path) -> None:
    """The modules and functions that Windows lacks are hidden once the libraries are loaded."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_POSIX, str(tmp_path)], cwd=ROOT, text=True, capture_output=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "locked\n"
