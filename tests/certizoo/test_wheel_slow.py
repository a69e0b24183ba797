"""A wheel in its own environment works in an empty folder: data files, configurations, commands."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from PIL import Image

from certizoo.ports import free_port
from tests.tools.launching import ROOT, environment

pytestmark = pytest.mark.slow
BUILT_OF = ("pyproject.toml", "README.md", "LICENSE")  # files beside the packages


def done(*command: str | Path, cwd: Path) -> str:
    """Return the output of a command that must succeed, with no project on its path."""
    kept = {key: value for key, value in environment().items() if not key.startswith("PYTHON")}
    found = subprocess.run(
        [*map(str, command)], cwd=cwd, env=kept, capture_output=True, text=True, timeout=500, check=False
    )
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-3000:]
    return found.stdout


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return `certizoo` of a wheel built from a copy of the tree, in an environment with this one's libraries."""
    root = tmp_path_factory.mktemp("wheel")
    tree, wheels, venv = root / "tree", root / "wheels", root / "venv"
    tree.mkdir()
    for name in [*BUILT_OF, *(path.parent.name for path in ROOT.glob("*/py.typed"))]:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tree / name)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
    done(*pip, "wheel", ".", "--no-deps", "--no-build-isolation", "-w", wheels, cwd=tree)
    shutil.rmtree(tree)
    done(sys.executable, "-m", "venv", "--without-pip", venv, cwd=root)
    site = next((venv / "lib").glob("python*/site-packages"))
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    wheel = next(wheels.glob("certizoo-*.whl"))
    done(*pip, "--python", venv / "bin" / "python", "install", "--no-deps", "--no-index", wheel, cwd=root)
    return venv / "bin" / "certizoo"


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    return tmp_path


def test_the_installed_package_is_the_one_that_runs(program: Path, empty: Path) -> None:
    where = done(program.parent / "python", "-c", "import zoo, certify; print(zoo.__file__)", cwd=empty)
    assert where.startswith(str(program.parents[1]))
    files = {path.name for path in next((program.parents[1] / "lib").glob("python*/site-packages")).glob("*/py.typed")}
    assert files == {"py.typed"}
    assert "certizoo COMMAND" in done(program, cwd=empty)


def test_files_of_common_names_in_the_current_folder_are_not_taken_for_ours(program: Path, empty: Path) -> None:
    for name in ("attacks", "shards", "registry", "tune", "configs"):
        (empty / f"{name}.py").write_text("raise SystemExit('the file of the user')\n")
    done(program.parent / "python", "-c", "import zoo, certify, trainers, tuning.search", cwd=empty)
    done(program, "shards", "digits", "data/digits", cwd=empty)
    assert "VERSION" in done(program, "registry", "list", "--help", cwd=empty).upper()


def test_models_shards_and_certificates(program: Path, empty: Path) -> None:
    assert "54.5 at 0.1" in done(program, "zoo", "cert*", cwd=empty)
    done(program, "shards", "digits", "data/digits", cwd=empty)
    assert (empty / "data" / "digits" / "digits.json").is_file()
    Image.new("RGB", (90, 60), "navy").save(empty / "sea.png")
    words = ("image", "sea.png", "model=cert_vit_c10", "method=adjoint", "steps=5", "out=answers")
    assert "the 32x32 image that the 90x60 photograph" in done(program, "certify", *words, cwd=empty)
    assert len(list((empty / "answers").iterdir())) == 2
    assert "--space NAME" in done(program, "tune", "--help", cwd=empty)


def test_a_training_by_the_launcher_ends_in_a_hand_over(program: Path, empty: Path) -> None:
    done(program, "shards", "digits", "data/digits", cwd=empty)
    short = ("train.max_steps=3", "registry.enabled=false", "certify.images=5", "certify.attack.steps=2", "name=short")
    flags = ("--num_gpus", "1", f"--master_port={free_port()}")
    done(program, "train", *flags, "+model=spec_vit_digits", "data=digits", *short, cwd=empty)
    assert (empty / "runs" / "short" / "handover" / "model.safetensors").is_file()
    assert (empty / "runs" / "short" / "certificate" / "report.html").is_file()
    assert os.listdir(empty / "runs") == ["short"]
