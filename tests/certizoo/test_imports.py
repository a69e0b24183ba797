"""Cheap imports: the collector pauses and resumes, a hidden library returns, and nothing loads more than it needs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from certizoo.extras import EXTRAS
from certizoo.imports import absent

ROOT = Path(__file__).parents[2]
BY_TIMM = {"fsspec", "packaging"}  # its hub requires them

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


def output(code: str, *words: str, cwd: Path = ROOT) -> str:
    done = subprocess.run([sys.executable, "-c", code, *words], cwd=cwd, text=True, capture_output=True, timeout=300)
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


# One process for what needs no extra, no POSIX, no library of a later stage, and no care about the current folder.
BARE = """
import json, os, sys
import certizoo.compat, hydra, multiprocessing.util, timm, torchvision, subprocess
absent = json.loads(sys.argv[1])
sys.modules.update(dict.fromkeys(["fcntl", "resource", "pwd", "grp", "termios", *absent]))
for name in ("register_at_fork", "fork", "getuid", "sched_getaffinity", "O_NOFOLLOW"):
    delattr(os, name)
import zoo, certify, certify.photos.cli, certify.explain_command, certizoo.errors
print("from", certizoo.__file__)
for name in absent:
    del sys.modules[name]
import certify.__main__, certify.stage.cli, certify.evaluation.cli, certizoo.shards
print("loaded", sorted({"matplotlib", "sklearn", "mlflow"} & set(sys.modules)))
from pathlib import Path
from certizoo.locks import sole_writer
from certizoo import UserError
folder = Path("locked")
with sole_writer(folder, "rows", "wait"):
    try:
        with sole_writer(folder, "rows", "wait"):
            raise SystemExit("two writers")
    except UserError:
        pass
with sole_writer(folder, "rows", "wait"):
    print("locked")
"""


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the lines of BARE, run in a folder that holds a clone named certizoo."""
    folder = tmp_path_factory.mktemp("bare")
    (folder / "certizoo").symlink_to(ROOT)
    absent = json.dumps(sorted(EXTRAS.keys() - BY_TIMM))
    return output(BARE, absent, cwd=folder).splitlines()


def test_models_certificates_and_photographs_need_no_extra_and_no_posix(bare: list[str]) -> None:
    """Extras, and the modules and functions that Windows lacks, are hidden once the other libraries are loaded."""
    assert any(line.startswith("from ") for line in bare)


def test_the_folder_above_a_clone_named_certizoo_is_not_taken_for_the_package(bare: list[str]) -> None:
    """`mlflow models serve`, started there, found the clone's folder before the installed package."""
    assert f"from {ROOT / 'certizoo' / '__init__.py'}" in bare


def test_figures_and_the_registry_are_loaded_when_they_are_needed(bare: list[str]) -> None:
    """Plotting, learning and publishing take seconds to import; a mistyped key is answered before."""
    assert "loaded []" in bare


def test_locks_hold_without_posix(bare: list[str]) -> None:
    assert bare[-1] == "locked"
