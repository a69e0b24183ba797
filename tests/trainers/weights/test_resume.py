"""Two ranks train, one is killed, and the run resumes to bit for bit the weights of an undisturbed run."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

import zoo
from certizoo import UserError
from certizoo.config.compose import compose_config
from tests.tools.checkpoints import whole
from tests.tools.launching import ROOT, TINY, finish, launch, ranks, reach, rows
from trainers.job import checkpoint
from trainers.job.checkpoint import Position, Saved
from trainers.job.prepare import prepare

SCRIPT = ROOT / "trainers" / "adv_train.py"
CAPS = "+model.attention={name:dp,v_cap:1.0,o_cap:1.0}"  # their power iteration has to resume too
RUN = (*TINY, CAPS, "train.epochs=2", "train.checkpoint_every=5", "train.log_every=1", "train.eval_images=64",
       "train.ema_decay=0.9", "data.workers=1")  # fmt: skip
STEPS_PER_EPOCH = 23  # ceil(1437 / 64)


def arguments(name: str) -> list[str]:
    return [*RUN, "train.micro_batch_size=16", f"name={name}"]


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> Path:
    status, output = finish(launch(SCRIPT, *arguments("calm"), cwd=folder))
    assert status == 0, output
    assert "auto settings: train.precision=fp32, train.compile=false" in output
    return folder / "runs" / "calm"


@pytest.mark.slow  # one process: trainers/test_end_to_end.py
def test_two_ranks_leave_a_handover(undisturbed: Path) -> None:
    model, config = zoo.handover.load(undisturbed / "handover")
    assert config["model"] == {**config["model"], "name": "dp_vit_ti", "num_classes": 10, "img_size": 8, "in_chans": 1}
    assert config["data"]["name"] == "digits"
    assert config["train"] == {**config["train"], "precision": "fp32", "compile": False}, "as settled, not auto"
    assert model(torch.rand(2, 1, 8, 8)).shape == (2, 10)
    metrics = json.loads((undisturbed / "handover" / "metrics.json").read_text())
    assert metrics["eval_images"] == 64
    assert metrics["step"] == 2 * STEPS_PER_EPOCH
    assert metrics["clean_acc"] >= metrics["pgd_acc"]
    assert metrics["clean_acc"] > 0.2, "it should learn something in two epochs"
    assert yaml.safe_load((undisturbed / "config.yaml").read_text())["train"]["epochs"] == 2
    assert len(list((undisturbed / "checkpoints").glob("step*"))) == 2


@pytest.mark.slow
def test_metrics_hold_one_row_a_step_and_one_an_epoch(undisturbed: Path) -> None:
    training = [row for row in rows(undisturbed) if "loss" in row]
    assert [row["step"] for row in training] == list(range(1, 2 * STEPS_PER_EPOCH + 1))
    assert {"loss", "acc", "msvp", "lr", "images_per_s", "loader_wait"} <= set(training[0])
    assert len([row for row in rows(undisturbed) if "clean_acc" in row]) == 2


@pytest.mark.slow  # in the gate, without a kill: test_states.py
def test_killed_and_resumed_equals_undisturbed(folder: Path, undisturbed: Path) -> None:
    run_dir = folder / "runs" / "killed"
    process = launch(SCRIPT, *arguments("killed"), cwd=folder)
    reach(process, run_dir, STEPS_PER_EPOCH + 9)
    ranks(process, SCRIPT)[1].kill()
    status, output = finish(process)
    assert status != 0, output
    assert not (run_dir / "handover").exists()

    marks = sorted((run_dir / "checkpoints").glob("step*/complete.json"))
    assert marks, "checkpoints every 5 steps should exist"
    torn = max((run_dir / "checkpoints").glob("step*")) / "rank00001.safetensors"
    if torn.exists():
        torn.write_bytes(torn.read_bytes()[:1000])  # as if the run had been killed while writing this one
    status, output = finish(launch(SCRIPT, *arguments("killed"), "resume=auto", cwd=folder))
    assert status == 0, output
    assert "is incomplete" in output
    resumed = int(output.split("at step ")[1].split()[0])
    assert resumed % STEPS_PER_EPOCH, "the resume should begin inside an epoch"
    weights = [path / "handover" / "model.safetensors" for path in (run_dir, undisturbed)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    for key in ("loss", "lr", "clean_acc", "pgd_acc"):  # the schedule, and the figures of the average
        values = [[row[key] for row in rows(path) if key in row] for path in (run_dir, undisturbed)]
        assert values[0] == values[1], key
    states = [trained_weights(path) for path in (run_dir, undisturbed)]
    assert all(torch.equal(states[0][name], value) for name, value in states[1].items())
    averaged = load_file(weights[1])
    assert any(not torch.equal(averaged[name], value) for name, value in states[1].items()), "it should be the average"


def trained_weights(run_dir: Path) -> dict[str, torch.Tensor]:
    """Return the weights that training continues with, not their average."""
    path = max((run_dir / "checkpoints").glob("step*"))
    return whole(path, "weight") | load_file(path / "buffers.safetensors")


@pytest.mark.slow  # in the gate, without a run: trainers/test_settings_and_job.py
def test_another_run_is_not_resumed_by_mistake(undisturbed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank checks this before there is a process group."""
    monkeypatch.chdir(undisturbed.parents[1])

    def refusal(*more: str, ranks: int = 2) -> str:
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        with pytest.raises(UserError) as caught:
            prepare(compose_config("adv_train", [*arguments("calm"), *more]))
        return str(caught.value)

    assert "resume=auto" in refusal()
    assert "name=" in refusal()
    assert "penalty.lambda_q=0.0001" in refusal("resume=auto", "penalty.lambda_q=0.5")
    assert "model.depth=2" in refusal("resume=auto", "++model.depth=3")
    monkeypatch.setenv("WORLD_SIZE", "2")
    job = prepare(compose_config("adv_train", [*arguments("calm"), "resume=auto", "train.log_every=7"]))
    assert job.saved is not None, "what the weights do not depend on may change"


@pytest.mark.parametrize("name", zoo.list_models())
def test_every_model_knows_its_own_run_again(name: str, tmp_path: Path) -> None:
    """The identity that a checkpoint stores equals the identity of the same command."""
    mine = checkpoint.fingerprint({"model": {"name": name} | zoo.model_options(name)}, "digest")
    (tmp_path / "mark.json").write_text(Saved("step-1", Position(), 1, mine).mark())
    saved = Saved("step-1", Position(), 1, json.loads((tmp_path / "mark.json").read_text())["fingerprint"])
    checkpoint.check_same_run(saved, mine, tmp_path)
