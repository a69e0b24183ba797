"""Who may import whom: data flows one way, and each heavy library has one door."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# folder -> the project's folders that it may import besides itself and `certizoo`
ALLOWED: dict[str, set[str]] = {
    "certizoo": set(),
    "zoo": set(),
    "shards": set(),
    "attacks": set(),
    "registry": set(),
    "certify": {"zoo", "shards", "attacks", "registry"},
    "trainers": {"zoo", "shards", "attacks", "registry", "certify"},
    "tuning": {"zoo", "shards", "attacks", "registry", "certify", "trainers"},
}
# library -> the only files or folders that may import it
DOORS = {
    "deepspeed": {"trainers/engine/engine.py"},
    "webdataset": {"shards/read.py", "shards/write.py"},
    "mlflow": {"registry"},
    "hydra": {"certizoo/compose.py"},
    "sklearn": {"shards", "certify/papers/feature_distance.py"},
    "auto_LiRPA": {"certify/methods/crown.py"},
    "ray": {"tuning/driver.py"},
    "fsspec": {"shards/store.py"},
    "pyautoattack": {"attacks/auto.py"},
    "foolbox": {"attacks/minimal.py"},
    "imagecorruptions": {"attacks/corruption.py"},
    "simplejpeg": {"shards/decode.py"},
}
FILES = sorted(path for folder in ALLOWED for path in (ROOT / folder).rglob("*.py"))


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports(path: Path) -> set[str]:
    """Top-level names of everything imported anywhere in the file, also inside functions."""
    found: set[str] = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide where a thing lives"
            found.add((node.module or "").split(".")[0])
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_one_way(path: Path) -> None:
    folder = path.relative_to(ROOT).parts[0]
    siblings = imports(path) & (set(ALLOWED) | {"tests", "benchmarks", "tune"})
    assert siblings <= ALLOWED[folder] | {folder, "certizoo"}


@pytest.mark.parametrize("library", DOORS)
def test_heavy_libraries_have_one_door(library: str) -> None:
    users = {path.relative_to(ROOT).as_posix() for path in FILES if library in imports(path)}
    assert users, f"nobody imports {library}: drop the dependency"
    assert all(any(user == door or user.startswith(f"{door}/") for door in DOORS[library]) for user in users), users


def test_searches_and_the_registry_do_not_wait_for_torch() -> None:
    code = "import registry, sys, tune, tuning.driver; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=120).returncode == 0


def test_no_pickle_is_read() -> None:
    """torch.load only with weights_only=True, no pickle module, no unsafe YAML."""
    for path in FILES:
        assert not {"pickle", "cloudpickle", "joblib", "dill"} & imports(path), path
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                assert any(k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in node.keywords), path


def test_configs_hold_yaml_only() -> None:
    assert {path.suffix for path in (ROOT / "configs").rglob("*") if path.is_file()} == {".yaml"}
