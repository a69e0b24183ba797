"""Import rules between folders and sub-folders.

Data flows one way, no cycles, one place for each heavy library, and no test imports a test.
"""

import ast
import shutil
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.tools.cases import mostly_slow
from tests.tools.folders import FILES, FOLDERS, ROOT, files_of, imported, libraries, parsed

# room (a sub-folder, or a file that stands beside sub-folders) -> the rooms of its own folder that it may import
_SHARED = {"certizoo", "certizoo/config"}
_ELLIPSOIDS = {"certify/shared", "certify/ellipsoids"}
_ORDERS = _ELLIPSOIDS | {"certify/adjoint", "certify/image", "certify/reaches", "certify/taylor"}
_METHODS = _ORDERS | {"certify/methods"}
_JOB = {"trainers/job", "trainers/objectives", "trainers/techniques"}
_BASE = {f"trainers/{name}.py" for name in ("settings", "ranks", "seeds", "model_parts", "callbacks")}
_RUN = _BASE | _JOB | {"trainers/engine", "trainers/weights"}
_BOUNDS = {"zoo/arithmetic.py", "zoo/spectral.py", "zoo/bounds"}
_WEIGHTS = {"zoo/weights"}
_LAYERS = _BOUNDS | {"zoo/layers", "zoo/attention", "zoo/attention/softmax", "zoo/primitives"}
_PENALTIES = {"zoo/penalty.py", "zoo/hinge.py"}
ROOMS: dict[str, set[str]] = {
    "certizoo": set(),  # its own files
    "certizoo/config": {"certizoo"},
    "certizoo/attacks": _SHARED,
    "certizoo/shards/format": _SHARED,
    "certizoo/shards/views": _SHARED,
    "certizoo/shards/remote": _SHARED | {"certizoo/shards/format"},
    "certizoo/shards/writing": _SHARED | {"certizoo/shards/format"},
    "certizoo/shards": _SHARED | {f"certizoo/shards/{room}" for room in ("format", "views", "remote", "writing")},
    "certizoo/registry/server": _SHARED,
    "certizoo/registry/tracking": _SHARED | {"certizoo/registry/server"},
    "certizoo/registry/versions": _SHARED | {"certizoo/registry/server", "certizoo/registry/tracking"},
    "certizoo/registry": _SHARED | {f"certizoo/registry/{room}" for room in ("server", "tracking", "versions")},
    "certify/shared": set(),
    "certify/adjoint": {"certify/shared"},
    "certify/ellipsoids": {"certify/shared"},
    "certify/image": _ELLIPSOIDS | {"certify/adjoint"},
    "certify/reaches": _ELLIPSOIDS,
    "certify/taylor": _ELLIPSOIDS | {"certify/image", "certify/reaches"},
    "certify/graph": {"certify/shared"},
    "certify/linear/enclosures": set(),
    "certify/linear": {"certify/shared", "certify/graph", "certify/linear/enclosures"},
    "certify/methods": _ORDERS | {"certify/linear"},
    "certify/rows": set(),
    "certify/served.py": set(),  # published versions refer to it
    "certify/api.py": {"certify/shared", "certify/methods", "certify/graph"},
    "certify/explanation.py": _METHODS | {"certify/graph", "certify/api.py"},
    "certify/explain_command.py": {"certify/explanation.py"},
    "certify/papers": _METHODS | {"certify/rows"},
    "certify/stage/report": {"certify/rows"},
    "certify/stage": _METHODS | {"certify/api.py", "certify/rows", "certify/stage/report"},
    "certify/evaluation": _METHODS | {"certify/api.py", "certify/rows"},
    "certify/photos": _METHODS | {"certify/api.py", "certify/rows", "certify/evaluation"},
    "certify/leaderboard": _METHODS | {"certify/rows", "certify/stage", "certify/evaluation"},
    "certify/__init__.py": _METHODS | {"certify/api.py", "certify/stage", "certify/explanation.py"},
    "certify/__main__.py": {
        "certify/shared",
        "certify/methods",
        "certify/stage",
        "certify/evaluation",
        "certify/papers",
        "certify/photos",
        "certify/leaderboard",
    },
    "trainers/__init__.py": set(),
    "trainers/settings.py": set(),
    "trainers/ranks.py": set(),
    "trainers/seeds.py": set(),
    "trainers/model_parts.py": set(),
    "trainers/callbacks.py": set(),
    "trainers/engine": _BASE,
    "trainers/objectives": _BASE,
    "trainers/techniques": _BASE,
    "trainers/job": _BASE | {"trainers/objectives", "trainers/techniques"},
    "trainers/weights": _BASE | _JOB | {"trainers/engine"},
    "trainers/doctor": _BASE | _JOB | {"trainers/engine"},
    "trainers/steps": _RUN,
    "trainers/certvit": _RUN | {"trainers/steps"},
    "trainers/entry.py": _RUN | {"trainers/steps"},
    "trainers/adv_train.py": {"trainers/entry.py"},
    "trainers/std_train.py": {"trainers/entry.py"},
    "trainers/constrain.py": {"trainers/entry.py", "trainers/certvit"},
    "zoo/arithmetic.py": set(),
    "zoo/spectral.py": {"zoo/arithmetic.py"},
    "zoo/penalty.py": {"zoo/spectral.py"},
    "zoo/hinge.py": {"zoo/spectral.py", "zoo/penalty.py"},
    "zoo/bounds": {"zoo/arithmetic.py", "zoo/spectral.py"},
    "zoo/layers": _BOUNDS,
    "zoo/primitives": _BOUNDS | {"zoo/layers"},
    "zoo/attention/theory": {"zoo/arithmetic.py", "zoo/spectral.py"},
    "zoo/attention/softmax": _BOUNDS | {"zoo/layers", "zoo/attention/theory"},
    "zoo/attention": _BOUNDS | {"zoo/layers", "zoo/attention/theory", "zoo/attention/softmax"},
    "zoo/rules.py": _LAYERS,
    "zoo/weights": set(),
    "zoo/user_models.py": set(),
    "zoo/models": _LAYERS | _WEIGHTS | {"zoo/user_models.py"},
    "zoo/handover.py": _LAYERS | _WEIGHTS | {"zoo/models", "zoo/user_models.py"},
    "zoo/export.py": _LAYERS | {"zoo/models", "zoo/handover.py"},
    "zoo/originals.py": _LAYERS | _WEIGHTS | {"zoo/models"},
    "zoo/importing.py": _LAYERS | _WEIGHTS | {"zoo/models", "zoo/handover.py", "zoo/originals.py"},
    "zoo/hub.py": _WEIGHTS | {"zoo/models"},
    "zoo/__main__.py": _LAYERS
    | _WEIGHTS
    | {"zoo/models", "zoo/handover.py", "zoo/export.py", "zoo/importing.py", "zoo/hub.py"},
    "zoo/__init__.py": _LAYERS
    | _WEIGHTS
    | {"zoo/models", "zoo/handover.py", "zoo/export.py", "zoo/rules.py"}
    | _PENALTIES,
}
# folder -> the only rooms and files of certify that it may import
OF_CERTIFY = {"trainers": {"certify/stage", "certify/papers/paper_bounds.py"}}
FILES_A_ROOM = 12  # besides __init__ and __main__
# rooms of more files: how many, and why
CROWDED = {
    "certizoo": (19, "what all folders share, none larger than a page"),
    "zoo/bounds": (19, "one promise a file; what is asked of one is asked of all"),
}
# library -> the only files or folders that may import it
DOORS = {
    "deepspeed": {"trainers/engine/engine.py"},
    "webdataset": {"certizoo/shards/writing/write.py"},
    "mlflow": {"certizoo/registry"},
    "hydra": {"certizoo/config/compose.py"},
    "sklearn": {"certizoo/shards", "certify/papers/feature_distance.py"},
    "auto_LiRPA": {"certify/methods/crown.py"},
    "ray": {"tuning/driver.py", "tuning/gauges.py", "tuning/memory.py", "tuning/nodes.py", "certify/rows/cluster.py"},
    "tensorboard": {"trainers/steps/sinks.py"},
    "wandb": {"trainers/steps/sinks.py"},
    "pydantic": {"certizoo/config/schema.py"},
    "annotated_types": {"certizoo/config/schema.py"},
    "fsspec": {"certizoo/shards/remote/store.py"},
    "pyautoattack": {"certizoo/attacks/auto.py"},
    "imagecorruptions": {"certizoo/attacks/corruption.py"},
    "simplejpeg": {"certizoo/images.py"},
    "cv2": {"certizoo/shards/views/kernels.py"},
    "tokenizers": {"certizoo/shards/format/tokens.py"},
}


def file_of(name: str, files: set[Path]) -> Path | None:
    """Return the project's file behind a dotted name, which may end in a name inside that file."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        path = Path(*parts[:end])
        for candidate in (path.with_suffix(".py"), path / "__init__.py"):
            if candidate in files:
                return candidate
    return None


def room_of(file: Path) -> str:
    """Return a file's sub-folder, the file itself beside sub-folders, or its folder where there are none."""
    divided = file.parts[0] != "certizoo" and any(room.startswith(f"{file.parts[0]}/") for room in ROOMS)
    return file.as_posix() if divided and len(file.parts) == 2 else file.parent.as_posix()


def faults(root: Path) -> list[str]:
    """Return every import below `root` that violates FOLDERS, ROOMS or OF_CERTIFY."""
    listed = files_of(root)
    files, found = set(listed), []
    for file in listed:
        folder, room = file.parts[0], room_of(file)
        outside = libraries(root / file) & {"tests", "benchmarks", "tune", "shards", "registry"}
        found += [f"{file} imports {name}, which is not of the product" for name in outside]
        for target in {file_of(name, files) for name in imported(root / file)} - {None, file}:
            assert target is not None
            other, its_room = target.parts[0], room_of(target)
            if other not in (folder, "certizoo") and other not in FOLDERS[folder]:
                found.append(f"{file} imports {target}: {folder} may not import {other}")
            if other == folder and its_room != room and its_room not in ROOMS[room]:
                found.append(f"{file} imports {target}: {room} may not import {its_room}")
            if other == "certify" and folder in OF_CERTIFY and not {its_room, target.as_posix()} & OF_CERTIFY[folder]:
                found.append(f"{file} imports {target}, which is none of {sorted(OF_CERTIFY[folder])}")
    return found


def crowds(root: Path) -> list[str]:
    """Return every folder below `root` with more files than FILES_A_ROOM or its entry in CROWDED."""
    found = []
    for room in sorted({file.parent for file in files_of(root)}):
        count = len([path for path in (root / room).glob("*.py") if not path.stem.startswith("__")])
        allowed, _ = CROWDED.get(room.as_posix(), (FILES_A_ROOM, ""))
        if count > allowed:
            found.append(f"{room} has {count} files, {allowed} are allowed: divide it, or say in CROWDED why not")
    return found


def test_imports_go_one_way() -> None:
    assert faults(ROOT) == []


def test_every_room_is_in_the_table_and_the_table_has_no_circle() -> None:
    undivided = set(FOLDERS) - set(ROOMS)
    assert {room_of(file) for file in FILES if len(file.parts) > 1} - undivided == set(ROOMS)
    for graph in (FOLDERS, ROOMS):
        assert list(TopologicalSorter(graph).static_order())


def test_no_files_import_one_another() -> None:
    """The check includes imports in functions and under TYPE_CHECKING.

    Names that a package re-exports count as imports of their files.
    """
    files = set(FILES)
    graph = {
        file: {file_of(name, files) for name in imported(ROOT / file)} - {None, file, file.parent / "__init__.py"}
        for file in FILES
        if file.name != "__init__.py"
    }
    assert list(TopologicalSorter(graph).static_order())


def test_rooms_are_small() -> None:
    assert crowds(ROOT) == []


def test_crowded_rooms_are_as_crowded_as_the_table_says() -> None:
    for room, (count, reason) in CROWDED.items():
        files = [path for path in (ROOT / room).glob("*.py") if not path.stem.startswith("__")]
        assert len(files) == count > FILES_A_ROOM, room
        assert reason


def imported_tests(root: Path) -> set[str]:
    """Return every import of a test module by tests, benchmarks and docs: helpers belong in tests/tools."""
    return {
        f"{path.relative_to(root)} imports {name}"
        for folder in ("tests", "benchmarks", "docs")
        for path in (root / folder).rglob("*.py")
        for name in imported(path)
        if name.startswith("tests.") and ".test_" in name
    }


def test_no_test_imports_a_test() -> None:
    assert not imported_tests(ROOT)


@pytest.mark.parametrize(
    "statement", ["from tests.zoo.test_a import b", "from tests.zoo import test_a", "import tests.zoo.test_a as a"]
)
def test_an_import_of_a_test_is_seen(statement: str, tmp_path: Path) -> None:
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "planted.py").write_text(f"def f() -> None:\n    {statement}\n")
    assert len(imported_tests(tmp_path)) == 1


FOLDERS_OF_ROOMS = [room for room in ROOMS if not room.endswith(".py")]
ONE_OF_EACH = {room.split("/")[0]: room for room in FOLDERS_OF_ROOMS}.values()  # of each package


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the product's files, to plant faults in them."""
    root = tmp_path_factory.mktemp("tree")
    for file in FILES:
        (root / file.parent).mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, root / file)
    return root


@pytest.mark.parametrize("room", mostly_slow(FOLDERS_OF_ROOMS, *ONE_OF_EACH))
def test_an_upward_import_planted_in_a_room_is_seen(room: str, copied: Path) -> None:
    forbidden = [other for other in ROOMS if other.startswith(room.split("/")[0]) and other not in {room, *ROOMS[room]}]
    above = next((other for other in forbidden if room in ROOMS[other]), forbidden[0])
    target = above.removesuffix(".py").replace("/", ".")
    for statement in (
        f"import {target}\n",
        f"def f() -> None:\n    import {target}\n",
        f"from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import {target}\n",
        "import tuning\n",
    ):
        planted = copied / room / f"planted_{abs(hash(statement))}.py"
        planted.write_text(statement)
        assert any(planted.name in fault for fault in faults(copied)), statement
        planted.unlink()
    assert faults(copied) == []


@pytest.mark.parametrize("room", sorted({file.parent.as_posix() for file in FILES}))
def test_a_file_too_many_is_seen(room: str, copied: Path) -> None:
    files = [path for path in (copied / room).glob("*.py") if not path.stem.startswith("__")]
    allowed, _ = CROWDED.get(room, (FILES_A_ROOM, ""))
    planted = [copied / room / f"planted_{i}.py" for i in range(allowed + 1 - len(files))]
    for path in planted[:-1]:
        path.touch()
    assert crowds(copied) == []
    planted[-1].touch()
    assert [fault for fault in crowds(copied) if fault.startswith(f"{room} ")]
    for path in planted:
        path.unlink()


@pytest.mark.parametrize("library", DOORS)
def test_heavy_libraries_have_one_door(library: str) -> None:
    users = {file.as_posix() for file in FILES if library in libraries(ROOT / file)}
    assert users, f"nobody imports {library}: drop the dependency"
    assert all(any(user == door or user.startswith(f"{door}/") for door in DOORS[library]) for user in users), users


def test_searches_and_the_registry_do_not_wait_for_torch() -> None:
    code = "import certizoo.registry, sys, tuning.__main__, tuning.driver; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=120).returncode == 0


# Calls that read pickles, or run a shell or foreign code, directly or in the library that they call.
READERS = {
    "load_checkpoint": "DeepSpeed unpickles; trainers/weights/states.py reads what training goes on from",
    "load_module_state_dict": "likewise",
    "restore": "Ray unpickles what lies in the folder",
    "unsafe_load": "runs what the YAML names",
    "full_load": "likewise",
    "read_pickle": "",
    "all_gather_object": "unpickles what another rank sends; World.texts does not",
    "gather_object": "likewise",
    "broadcast_object_list": "likewise",
    "scatter_object_list": "likewise",
    "recv_object_list": "likewise",
    "system": "a shell",
    "popen": "a shell",
    "getoutput": "a shell",
    "exec": "",
}
UNSAFE = {"weights_only": "False", "shell": "True", "allow_pickle": "True"}


def unsafe_calls(path: Path, ours: bool) -> list[str]:
    """Return calls that could run a file as code.

    `ours` is False for tests, which may write pickles to attack with.
    """
    found = []
    for node in ast.walk(parsed(path)):
        if not isinstance(node, ast.Call):
            continue
        name, _, last = ast.unparse(node.func).rpartition(".")
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        unsafe = [f"{key}={value}" for key, value in UNSAFE.items() if given.get(key) == value]
        if last == "load" and name == "torch" and given.get("weights_only") != "True":
            unsafe.append("without weights_only=True")
        if last in ("load", "loads", "Unpickler") and name.endswith(("pickle", "yaml", "marshal", "dill", "joblib")):
            unsafe.append("reads objects")
        if ours and last in READERS and (name or last == "exec"):
            unsafe.append(READERS[last])
        found += [f"{path}:{node.lineno}: {ast.unparse(node.func)}: {reason}" for reason in unsafe]
    return found


def test_no_pickle_is_read() -> None:
    """Nothing else runs its input either; whole trainings are in tests/trainers/weights/test_no_pickle.py."""
    for path in (ROOT / file for file in FILES):
        assert not {"pickle", "cloudpickle", "joblib", "dill", "shelve", "marshal"} & libraries(path), path
        assert unsafe_calls(path, ours=True) == []
    for path in (ROOT / "tests").rglob("*.py"):
        assert unsafe_calls(path, ours=False) == []


@pytest.mark.parametrize(
    "call",
    ["torch.load(x)", "torch.load(x, weights_only=False)", "pickle.load(x)", "yaml.load(x)", "os.system(x)", "exec(x)",
     "engine.load_checkpoint(x)", "dist.all_gather_object(x, y)", "subprocess.run(x, shell=True)",
     "np.load(x, allow_pickle=True)", "tune.Tuner.restore(x)"],
)  # fmt: skip
def test_a_reader_of_pickles_is_seen(call: str, tmp_path: Path) -> None:
    (tmp_path / "planted.py").write_text(f"{call}\n")
    assert unsafe_calls(tmp_path / "planted.py", ours=True)


def test_configs_hold_yaml_only() -> None:
    assert {path.suffix for path in (ROOT / "configs").rglob("*") if path.is_file()} == {".yaml"}
