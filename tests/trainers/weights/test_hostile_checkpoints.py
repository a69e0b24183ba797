"""A foreign run folder: whatever its checkpoint holds, no code runs, and resuming is refused in one line."""

import json
import os
import pickle
import re
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from certizoo import UserError
from certizoo.files import sha256
from tests.tools.launching import ROOT, TINY, environment
from tests.tools.trained import Trained
from trainers.certvit.run import FACT, read_layer
from trainers.job import checkpoint
from trainers.job.checkpoint import MARK, Position, Saved
from trainers.job.folder import refuse_used_folder
from trainers.weights import saving, states

pytestmark = pytest.mark.hostile
RANK = states.rank_file(0)


class Payload:
    """An object that writes the file `ran` to the working directory when unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, ("ran", "w"))


def resume(run_dir: Path) -> Trained:
    """Resume as a start with resume=auto does, in its order."""
    refuse_used_folder(run_dir, "auto")
    saved = checkpoint.newest(run_dir)
    if saved is None:
        raise UserError("nothing to resume from, and the run would start anew")
    checkpoint.check_same_run(saved, {"seed": 0}, run_dir)
    checkpoint.check_position(saved, steps_per_epoch=10, total_steps=100, batch_size=16)
    trained: Any = Trained()
    trained.step()  # the payload must not have run
    saving.load(trained, None, run_dir, saved)
    return trained


@pytest.fixture
def left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a run's folder with a checkpoint of its first step."""
    monkeypatch.chdir(tmp_path)
    trained: Any = Trained()
    saving.save(trained, None, tmp_path / "run", Saved(checkpoint.tag(1), Position(1, 0, 1), 1, {"seed": 0}), 2)
    return tmp_path / "run"


def test_a_checkpoint_of_our_own_is_resumed(left: Path) -> None:
    """Every attack below modifies this checkpoint."""
    first, second = Trained(), resume(left)
    for trained in (first, second):
        trained.step()
    assert all(torch.equal(a, b) for a, b in zip(first.module.parameters(), second.module.parameters(), strict=True))


# attacks on the mark -------------------------------------------------------------------------------------------------

Mark = dict[str, Any]
BOMB = "[" * 200_000


def said(**values: Any) -> Callable[[Mark], Mark]:
    return lambda mark: mark | values


def at(**values: Any) -> Callable[[Mark], Mark]:
    return lambda mark: mark | {"position": mark["position"] | values}


def listing(name: str, digest: str = "0" * 64, size: Any = 1) -> Callable[[Mark], Mark]:
    return lambda mark: mark | {"files": {name: size}, "sha256": {name: digest}}


MARKS: dict[str, Callable[[Mark], Any]] = {
    "of no format": lambda mark: {key: value for key, value in mark.items() if key != "format"},
    "of another format": said(format=3),
    "no dictionary": lambda mark: [mark],
    "nothing": lambda mark: {"format": 2},
    "a negative step": at(step=-1),
    "a huge step": at(step=2**70),
    "a step of another folder": at(step=2),
    "a step that is a truth value": at(step=True),
    "a step that is no number": at(step=float("nan")),
    "a step that is a text": at(step="1"),
    "a negative epoch": at(epoch=-1),
    "an epoch that was never there": at(epoch=7),
    "a batch beyond its epoch": at(batch_in_epoch=2**40),
    "a position with more": at(tag="../../x"),
    "earlier ranks that are a text": at(before="abcd"),
    "earlier ranks of three numbers": at(before=[[1, 1, 1]]),
    "no earlier ranks": at(before=[[0, 1, 1, 1]]),
    "earlier ranks that read nothing": at(before=[[1, 1, 1, 0]]),
    "more earlier ranks than images": at(before=[[2**50, 1, 1, 1]]),
    "half an earlier rank": at(before=[[1.5, 1, 1, 1]]),
    "earlier workers without number": at(before=[[1, 2**50, 1, 1]]),
    "more read than an epoch has": at(before=[[1, 1, 1, 17]]),
    "a list of positions": said(position=[1, 0, 1]),
    "ranks that are a text": said(world_size="1"),
    "negative ranks": said(world_size=-1),
    "any ranks inside an epoch": said(world_size=None),
    "more ranks than images": said(world_size=2**50),
    "no ranks": said(world_size=0),
    "a fingerprint that is a list": said(fingerprint=["seed"]),
    "another fingerprint": said(fingerprint={"seed": "\x1b[2J" * 50_000}),
    "no files": said(files={}, sha256={}),
    "files that are a list": said(files=[RANK]),
    "files without digests": said(sha256={}),
    "a digest that is a path": lambda mark: mark | {"sha256": dict.fromkeys(mark["files"], "../../x")},
    "a wrong digest": lambda mark: mark | {"sha256": dict.fromkeys(mark["files"], "0" * 64)},
    "a file above": listing("../../x"),
    "a file at the root": listing("/etc/passwd"),
    "a file of pickles": listing("mp_rank_00_model_states.pt"),
    "a file below": listing(f"x/{RANK}"),
    "a name that ends in a line": listing(f"{RANK}\n"),
    "a negative size": listing(RANK, size=-1),
    "a size that is a text": listing(RANK, size="1"),
}  # fmt: skip
TEXTS: dict[str, str | bytes] = {
    "a bomb of brackets": BOMB,
    "five million numbers": json.dumps([0] * 5_000_000),
    "half of it": '{"position": {"st',
    "no text": b"\xff\xfe\x00",
    "a pickle": pickle.dumps(Payload()),
}


def refused(run_dir: Path, words: str = "") -> None:
    with pytest.raises(UserError) as caught:
        resume(run_dir)
    assert not Path("ran").exists(), "it was executed"
    message = str(caught.value)
    assert "\n" not in message
    assert "\x1b" not in message
    assert len(message) < 1000
    assert re.search(words, message), message


@pytest.mark.parametrize("attack", MARKS)
def test_a_mark_is_refused(left: Path, attack: str) -> None:
    mark = left / "checkpoints" / checkpoint.tag(1) / MARK
    mark.write_text(json.dumps(MARKS[attack](json.loads(mark.read_text()))))
    refused(left)


@pytest.mark.parametrize("attack", TEXTS)
def test_an_invalid_mark_is_refused(left: Path, attack: str) -> None:
    text = TEXTS[attack]
    (left / "checkpoints" / checkpoint.tag(1) / MARK).write_bytes(text if isinstance(text, bytes) else text.encode())
    refused(left, f"{MARK} .*(not readable JSON|not UTF-8|larger|too large)")


# attacks on the tensors ----------------------------------------------------------------------------------------------

State = dict[str, Tensor]
WEIGHT = "0.weight:0:weight"  # 6 entries


def without(state: State, *names: str) -> State:
    return {name: value for name, value in state.items() if name not in names}


def cut(*parts: tuple[object, int, int]) -> Callable[[State], State]:
    """Store the weight in parts, each with its claimed start and its entries."""
    return lambda state: (
        without(state, WEIGHT)
        | {f"0.weight:{said}:weight": state[WEIGHT][start:end].clone() for said, start, end in parts}
    )


STATES: dict[str, Callable[[State], State]] = {
    "a parameter less": lambda state: without(state, WEIGHT),
    "a parameter more": lambda state: state | {"1.weight:0:weight": torch.ones(2)},
    "a parameter that is a path": lambda state: state | {"../../x:0:weight": torch.ones(2)},
    "a key more": lambda state: state | {"0.weight:0:step": torch.ones(6)},
    "a name of one word": lambda state: state | {"x": torch.ones(2)},
    "a larger shape": lambda state: state | {WEIGHT: torch.ones(7)},
    "a smaller shape": lambda state: state | {WEIGHT: torch.ones(5)},
    "two axes": lambda state: state | {WEIGHT: torch.ones(2, 3)},
    "no axis": lambda state: state | {WEIGHT: torch.ones(())},
    "nothing": lambda state: state | {WEIGHT: torch.ones(0)},
    "float64": lambda state: state | {WEIGHT: torch.ones(6).double()},
    "float16": lambda state: state | {WEIGHT: torch.ones(6).half()},
    "integers": lambda state: state | {WEIGHT: torch.ones(6).int()},
    "a number that is none": lambda state: state | {WEIGHT: torch.full((6,), float("nan"))},
    "an infinite momentum": lambda state: state | {"0.weight:0:exp_avg": torch.full((6,), float("inf"))},
    "pieces that overlap": cut((0, 0, 4), (3, 3, 6)),
    "pieces with a gap": cut((0, 0, 3), (4, 4, 6)),
    "pieces beyond the end": cut((0, 0, 6), (6, 0, 2)),
    "a negative start": cut((-1, 0, 6)),
    "a huge start": cut(("9" * 40, 0, 6)),
    "a start that is no number": cut(("0x0", 0, 6)),
    "another start": cut((1, 0, 6)),
}


def rewritten(run_dir: Path, name: str, content: bytes) -> None:
    """Replace one of our files and its mark: whoever can write one can write the other."""
    path = run_dir / "checkpoints" / checkpoint.tag(1)
    (path / name).write_bytes(content)
    mark = json.loads((path / MARK).read_text())
    mark["files"][name], mark["sha256"][name] = len(content), sha256(path / name)
    (path / MARK).write_text(json.dumps(mark))


def saved_bytes(state: State, path: Path) -> bytes:
    save_file(state, path)
    return path.read_bytes()


@pytest.mark.parametrize("attack", STATES)
def test_states_of_another_model_are_refused(left: Path, tmp_path: Path, attack: str) -> None:
    state = load_file(left / "checkpoints" / checkpoint.tag(1) / RANK)
    assert state[WEIGHT].shape == (6,)
    rewritten(left, RANK, saved_bytes(STATES[attack](state), tmp_path / "new"))
    refused(left, "cannot be loaded")


BUFFERS: dict[str, Callable[[State], State]] = {
    "less": lambda state: without(state, "1.running_mean"),
    "more": lambda state: state | {"x": torch.ones(2)},
    "another shape": lambda state: state | {"1.running_mean": torch.ones(2, 10**6)},
    "another type": lambda state: state | {"1.running_mean": torch.ones(2).double()},
    "no numbers": lambda state: state | {"1.running_mean": torch.full((2,), float("nan"))},
}


@pytest.mark.parametrize("attack", BUFFERS)
def test_buffers_of_another_model_are_refused(left: Path, tmp_path: Path, attack: str) -> None:
    state = load_file(left / "checkpoints" / checkpoint.tag(1) / states.BUFFERS)
    rewritten(left, states.BUFFERS, saved_bytes(BUFFERS[attack](state), tmp_path / "new"))
    refused(left, "cannot be loaded")


def with_header(header: object, data: bytes = b"\0" * 24) -> bytes:
    text = header if isinstance(header, str) else json.dumps(header)
    return struct.pack("<Q", len(text)) + text.encode() + data


def tensor(start: int, end: int, shape: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


FILES = {
    "a pickle": pickle.dumps(Payload()),
    "nothing": b"",
    "a header without end": b"\xff" * 64,
    "a header larger than the file": struct.pack("<Q", 10**9) + b"{}",
    "a header of brackets": with_header(BOMB),
    "a header that is no text": struct.pack("<Q", 4) + b"\xff\xfe\x00\x00",
    "a header that is a list": with_header([]),
    "offsets that overlap": with_header({"a:0:weight": tensor(0, 24, [6]), "b:0:weight": tensor(0, 24, [6])}),
    "offsets beyond the end": with_header({WEIGHT: tensor(0, 2**62, [2**60])}),
    "negative offsets": with_header({WEIGHT: tensor(-24, 0, [6])}),
    "offsets backwards": with_header({WEIGHT: tensor(24, 0, [6])}),
    "a shape that overflows": with_header({WEIGHT: tensor(0, 24, [2**32, 2**32, 6])}),
    "a shape that is not its bytes": with_header({WEIGHT: tensor(0, 24, [7])}),
    "a type that there is not": with_header({WEIGHT: tensor(0, 24, [6], "OBJECT")}),
    "bytes that nobody owns": with_header({}, b"\0" * 2**20),
    "a name twice": with_header('{"%s":%s,"%s":%s}' % ((WEIGHT, json.dumps(tensor(0, 24, [6]))) * 2)),
}  # fmt: skip


@pytest.mark.parametrize("name", [RANK, states.BUFFERS])
@pytest.mark.parametrize("attack", FILES)
def test_invalid_files_are_refused(left: Path, name: str, attack: str) -> None:
    rewritten(left, name, FILES[attack])
    refused(left)


FACTS = dict(zip(FACT, ("0", 1.0, 0.5, 0.1, 0.0), strict=True))
LAYERS: dict[str, tuple[State, object]] = {
    "no facts": ({"weight": torch.ones(2, 3)}, None),
    "facts that are a text": ({"weight": torch.ones(2, 3)}, "x"),
    "a norm that is a text": ({"weight": torch.ones(2, 3)}, FACTS | {"norm_after": "\x1b[2J"}),
    "a bomb": ({"weight": torch.ones(2, 3)}, BOMB),
    "another shape": ({"weight": torch.ones(3, 2)}, FACTS),
    "no numbers": ({"weight": torch.full((2, 3), float("nan"))}, FACTS),
    "another name": ({"bias": torch.ones(2, 3)}, FACTS),
}


@pytest.mark.parametrize("attack", LAYERS)
def test_an_invalid_layer_of_certvit_is_refused(tmp_path: Path, attack: str) -> None:
    state, fact = LAYERS[attack]
    path = tmp_path / "0.safetensors"
    save_file({"weight": torch.ones(2, 3)}, path, {"fact": json.dumps(FACTS)})
    assert read_layer(path, torch.zeros(2, 3))[1] == FACTS
    text = fact if attack == "a bomb" else json.dumps(fact)
    save_file(state, path, {"fact": str(text)} if fact else None)
    with pytest.raises(UserError, match="delete it"):
        read_layer(path, torch.zeros(2, 3))


# attacks by the folder -----------------------------------------------------------------------------------------------


def linked(path: Path, target: Path) -> None:
    """Replace the path by a link to a copy elsewhere."""
    target.parent.mkdir(parents=True, exist_ok=True)
    path.rename(target)
    path.symlink_to(target)


def piped(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


TAG = checkpoint.tag(1)


@pytest.mark.parametrize("name", [f"{TAG}/{RANK}", f"{TAG}/{states.BUFFERS}", f"{TAG}/{MARK}", TAG, ""])
def test_links_in_the_folder_are_refused(left: Path, tmp_path: Path, name: str) -> None:
    linked(left / "checkpoints" / name, tmp_path / "elsewhere" / "x")
    refused(left, "is a link")


@pytest.mark.parametrize(
    "name", ["logs/rank0.log", "metrics.jsonl", "config.yaml.part", "checkpoints/part", "handover"]
)
def test_a_link_where_the_run_will_write_is_refused(left: Path, tmp_path: Path, name: str) -> None:
    (left / name).parent.mkdir(exist_ok=True)
    (left / name).symlink_to(tmp_path / "victim")
    refused(left, "is a link")


@pytest.mark.parametrize("name", [RANK, states.BUFFERS, MARK])
def test_a_pipe_blocks_nothing(left: Path, name: str) -> None:
    piped(left / "checkpoints" / TAG / name)
    refused(left)


# the whole command ---------------------------------------------------------------------------------------------------

OF_DEEPSPEED = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt", RANK)


@pytest.mark.slow
def test_a_run_folder_of_pickles_runs_nothing(digits: Path, tmp_path: Path) -> None:
    """The folder is complete, in DeepSpeed's former format and with these settings; every file is a program."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "digits").symlink_to(digits)
    command = [sys.executable, str(ROOT / "trainers" / "adv_train.py"), *TINY, "train.max_steps=2", "name=theirs"]

    def run(*more: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [*command, *more], cwd=tmp_path, env=environment(), text=True, capture_output=True, timeout=120
        )

    assert run("train.checkpoint_every=1", "train.eval_images=0").returncode == 0
    path = tmp_path / "runs" / "theirs" / "checkpoints" / checkpoint.tag(2)
    mark = json.loads((path / MARK).read_text())
    for file in path.iterdir():
        file.unlink()
    for name in OF_DEEPSPEED:
        torch.save(Payload(), path / name)
    del mark["format"]
    mark["files"] = {name: (path / name).stat().st_size for name in OF_DEEPSPEED}
    (path / MARK).write_text(json.dumps(mark))
    done = run("resume=auto")
    assert not (tmp_path / "ran").exists(), "it was executed"
    assert done.returncode == 2, done.stderr
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "Traceback" not in done.stderr
    assert "pickles" in error
    assert "name=ANOTHER" in error
