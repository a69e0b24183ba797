"""A wheel in its own environment works in an empty folder: data files, configurations, commands."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

import pytest
from PIL import Image

from certizoo.ports import free_port
from tests.tools.launching import ROOT, environment
from tests.tools.snippets import snippets

pytestmark = pytest.mark.slow
BUILD = "import sys; from setuptools import build_meta; build_meta.build_{kind}(sys.argv[1])"
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
def archives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a wheel and a source archive, built from a copy of the tree."""
    root = tmp_path_factory.mktemp("archives")
    tree, dist = root / "tree", root / "dist"
    tree.mkdir()
    for name in [*BUILT_OF, *(path.parent.name for path in ROOT.glob("*/py.typed"))]:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tree / name)
    for kind in ("wheel", "sdist"):
        done(sys.executable, "-c", BUILD.format(kind=kind), dist, cwd=tree)
    shutil.rmtree(tree)
    return dist


@pytest.fixture(scope="module")
def program(archives: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return `certizoo` of the wheel, in an environment with this one's libraries."""
    root = tmp_path_factory.mktemp("wheel")
    venv, pip = root / "venv", (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
    done(sys.executable, "-m", "venv", "--without-pip", venv, cwd=root)
    site = next((venv / "lib").glob("python*/site-packages"))
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    wheel = next(archives.glob("certizoo-*.whl"))
    done(*pip, "--python", venv / "bin" / "python", "install", "--no-deps", "--no-index", wheel, cwd=root)
    return venv / "bin" / "certizoo"


def test_the_archives_are_valid_and_hold_the_data_files(archives: Path) -> None:
    """`twine check --strict`, as before an upload."""
    wheel, source = next(archives.glob("*.whl")), next(archives.glob("*.tar.gz"))
    assert done(sys.executable, "-m", "twine", "check", "--strict", wheel, source, cwd=archives).count("PASSED") == 2
    with tarfile.open(source) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    for name in ("certizoo/configs/certify.yaml", "zoo/weights/table.yaml", "certify/photos/samples/ship.png"):
        assert name in held
    assert wheel.stat().st_size < 40 * 2**20


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
    quick = ("model=cert_vit_c10", "method=adjoint", "steps=5")
    assert "ship.png: ship" in done(program, "certify", "image", "ship", *quick, cwd=empty)
    words = ("image", "sea.png", *quick, "out=answers")
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


def test_a_package_adds_one_of_each_without_a_fork(program: Path, empty: Path) -> None:
    """The package of docs/howto/my_package.md, in an environment of its own."""
    for block in snippets("my_package.md", (ROOT / "docs" / "howto" / "my_package.md").read_text()):
        if block.file:
            (empty / block.file).parent.mkdir(parents=True, exist_ok=True)
            (empty / block.file).write_text(block.text)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "--python", program.parent / "python")
    done(*pip, "install", "--no-deps", "--no-index", "--no-build-isolation", empty / "mine", cwd=empty)
    try:
        assert "Warm" in done(program, "zoo", "show", "warm_vit_ti", cwd=empty)
        done(program, "shards", "digits", "data/digits", cwd=empty)
        short = ("model.embed_dim=16", "model.depth=2", "model.num_heads=2", "model.patch_size=4", "train.max_steps=3",
                 "model.global_pool=avg", "registry.enabled=false", "certify.images=5", "certify.attack.steps=2",
                 "certify.method=adjoint", "name=warm")  # fmt: skip
        flags = ("--num_gpus", "1", f"--master_port={free_port()}")
        words = ("+model=warm_vit_ti", "data=digits", "objective.name=smooth", "train.callbacks=[note]", *short)
        done(program, "train", *flags, "adv_train", *words, cwd=empty)
        assert (empty / "runs" / "warm" / "status.txt").read_text() == "FINISHED"
        given = ("handover=runs/warm/handover", "protocol=noise", "images=5", "out=attacked")
        done(program, "certify", "evaluate", *given, cwd=empty)
        assert "noise" in (empty / "attacked" / "evaluation.json").read_text()
        assert "warm" in done(program, "tune", "--help", cwd=empty)
    finally:
        done(*pip, "uninstall", "--yes", "certizoo-mine", cwd=empty)
