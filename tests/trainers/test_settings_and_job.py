"""Parts of the trainers without a process group: configuration, schedule, marks of checkpoints, reports."""

import copy
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from certizoo import UserError
from certizoo.config.compose import CONFIGS, compose_config
from certizoo.reading import Reading
from tests.tools.cases import mostly_slow
from tests.tools.checkpoints import whole
from tests.tools.launching import ROOT, TINY, environment
from trainers.entry import launcher_argv
from trainers.job import checkpoint
from trainers.job.checkpoint import Position, Saved
from trainers.job.keys import defaults
from trainers.job.schedule import ScheduleConfig
from trainers.objectives import LIPSCHITZ, OBJECTIVES, Probe
from trainers.seeds import seed_of
from trainers.settings import DeepSpeedConfig, ObjectiveConfig, OptimizerConfig, PenaltyConfig, TrainConfig
from trainers.steps.report import ROWS, Report
from trainers.weights import states
from zoo.models.convnet import ConvNet

RANK = states.rank_file(0)


# --- the command line ----------------------------------------------------------------------------------------------


def test_the_launchers_flag_is_dropped_and_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")  # otherwise the settings below would stay
    for flags in (["--local_rank=3"], ["--local-rank", "3"], ["--local_rank", "3"]):
        monkeypatch.delenv("LOCAL_RANK", raising=False)
        assert launcher_argv([*flags, "+model=x", "seed=1"]) == ["+model=x", "seed=1"]
        assert os.environ["LOCAL_RANK"] == "3"
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert launcher_argv(["--local_rank=3", "a=b"]) == ["a=b"]
    assert os.environ["LOCAL_RANK"] == "1", "what the launcher put into the environment comes first"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([], ["+model=", "spec_vit_b"]),
        (["model=spec_vit_b"], ["+model=NAME"]),
        (["+model=dp_vit_b", "train.epocs=3"], ["train.epocs", "train.epochs"]),
        (["+model=dp_vit_b", "data=cifar11"], ["no data 'cifar11'", "cifar10"]),
        (["+model=dp_vit_b", "sede=3"], ["'sede'", "seed"]),
        (["+model=dp_vit_b", "+seed=3"], ["'seed'", "plus"]),
        (["+model=dp_vit_b", "nonsense"], ["nonsense"]),
        (["+model=dp_vit_b", "seed=${nope}"], ["nope"]),
        (["+model=dp_vit_b", "~nope.x"], ["nope"]),
    ],
)
def test_a_wrong_command_is_one_line(overrides: list[str], words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        compose_config("adv_train", overrides)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_the_script_as_typed_says_what_is_missing(tmp_path: Path) -> None:
    """It works from any folder without the launcher, with exit status 2 and one line."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "trainers" / "std_train.py")],
        cwd=tmp_path, env=environment(), text=True, capture_output=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("error: no model given")
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "group",
    mostly_slow(
        ("attack", "objective", "penalty", "hinge", "deepspeed", "optimizer", "schedule"),
        "penalty",
        "optimizer",
        "hinge",
    ),
)
def test_every_option_of_a_group_is_accepted(
    group: str, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainers.job.prepare import prepare

    shutil.copytree(digits, tmp_path / "data" / "digits")
    monkeypatch.chdir(tmp_path)
    for path in (CONFIGS / group).glob("*.yaml"):
        model = ["+model=conv_4c3f_mnist"] if path.stem in LIPSCHITZ else ["+model=dp_vit_ti", "model.patch_size=4"]
        beside = ["deepspeed=zero0"] if path.stem == "muon" else []  # whole matrices
        job = prepare(compose_config("adv_train", [*model, *beside, "data=digits", f"{group}={path.stem}"]))
        assert path.read_text().startswith("# "), f"{path.name} is a lab note"
        if group == "objective":
            assert job.objective.name in OBJECTIVES


def test_a_wrong_value_is_refused_before_any_work(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainers.job.prepare import prepare

    shutil.copytree(digits, tmp_path / "data" / "digits")
    monkeypatch.chdir(tmp_path)
    wrong = {
        "+train.epoch=1": "nearest: train.epochs, ",
        "train.epochs=abc": "train.epochs",
        "train.epochs=0": "train.epochs",
        "train.precision=fp16": "train.precision",
        "train.attack_precision=fp16": "train.attack_precision",
        "train.sam_rho=-1": "train.sam_rho",
        "deepspeed.stage=4": "one of 0, 1, 2, 3",
        "deepspeed.persistent_below=-1": "deepspeed.persistent_below",
        "mix.prob=2": "mix.prob",
        "masks.warmup=0": "masks.warmup",
        "+objective.beta=-1": "objective.beta",
        "attack.norm=l7": "attack.norm",
        "+attack={norm: linf, eps: 8}": r"set attack.eps=0\.03137 for 8/255",
        "optimizer.name=lion": "optimizer.name",
        "schedule.name=linear": "schedule.name",
        "resume=yes": "give auto",
        "name=": "name='' is invalid",
        "data.root=nowhere": "nowhere",
        "certify.eps=[]": "certify",
        "certify.norm=l7": "give one of l2, linf",
        "certify.method=WRONG": "no certification method 'WRONG'",
        "registry.uri='http://me:secret@host'": "MLFLOW_TRACKING_URI",
    }
    for override, word in wrong.items():
        with pytest.raises(UserError, match=word):
            prepare(compose_config("adv_train", [*TINY, "certify.enabled=true", override]))
    assert not (tmp_path / "runs").exists()


def test_a_run_that_diverges_stops_and_keeps_its_checkpoints(digits: Path, tmp_path: Path) -> None:
    """Plain python, a world of one; the learning rate becomes absurd during the warm-up."""
    shutil.copytree(digits, tmp_path / "data" / "digits")
    wild = ["optimizer=sgd", "optimizer.lr=1e30", "train.clip_grad=0", "train.checkpoint_every=1", "name=wild"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "trainers" / "adv_train.py"), *TINY, *wild],
        cwd=tmp_path, env=environment(), text=True, capture_output=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert "Traceback" not in done.stderr
    assert "step " in error
    assert " lr " in error or "weights are no longer finite" in error
    named = [word.strip(";:.") for word in error.split() if "runs/" in word]
    assert all((tmp_path / path).exists() for path in named), "it sends nobody to a folder that does not exist"
    saved = checkpoint.newest(tmp_path / "runs" / "wild")
    if saved is not None:
        state = whole(checkpoint.folder(tmp_path / "runs" / "wild") / saved.tag, "weight")
        assert all(value.isfinite().all() for value in state.values())


# --- numbers ---------------------------------------------------------------------------------------------------------


def test_batch_arithmetic() -> None:
    train = TrainConfig(epochs=1, batch_size=64, micro_batch_size=8)
    assert (train.micro_batch(2), train.accumulation(2)) == (8, 4)
    assert replace(train, micro_batch_size=None).accumulation(2) == 1


def test_cosine_warms_up_and_ends_low() -> None:
    schedule = ScheduleConfig(name="cosine", warmup_epochs=2, min_lr_ratio=0.1)
    lr = [schedule.factor(step, total_steps=100, steps_per_epoch=10) for step in range(100)]
    assert lr[0] == pytest.approx(1 / 20)
    assert lr[19] == 1.0
    assert max(lr) == 1.0
    assert lr[20:] == sorted(lr[20:], reverse=True)
    assert 0.1 <= lr[-1] < 0.11


@pytest.mark.parametrize(("epochs", "warmup"), [(1, 0), (40, 20), (100, 50), (1000, 50)])
def test_an_unset_warm_up_is_five_epochs_or_a_twentieth(epochs: int, warmup: int) -> None:
    schedule = ScheduleConfig(name="cosine", warmup_epochs=None)
    assert schedule.warmup(total_steps=10 * epochs, steps_per_epoch=10) == pytest.approx(warmup, abs=0.5)
    assert schedule.factor(10 * epochs - 1, 10 * epochs, 10) < 1, "the last step is beyond the warm-up"
    assert schedule.factor(0, 1, 10) == 1.0, "a run of one step"


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_one_cycle_is_torchs(name: str) -> None:
    schedule, weights = ScheduleConfig(name="onecycle"), [torch.nn.Parameter(torch.zeros(1))]
    optimizer = torch.optim.SGD(weights, 0.2, momentum=0.9) if name == "sgd" else torch.optim.AdamW(weights, 0.2)
    theirs = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=50)
    for step in range(50):
        group = optimizer.param_groups[0]
        assert 0.2 * schedule.factor(step, 50, 10) == pytest.approx(group["lr"])
        assert schedule.momentum(step, 50) == pytest.approx(group["momentum"] if name == "sgd" else group["betas"][0])
        optimizer.step()
        theirs.step()
    assert ScheduleConfig(name="cosine").momentum(3, 50) is None
    assert 0 < ScheduleConfig(name="onecycle").factor(0, 1, 1) <= 1, "a run of one step"


def test_step_schedule_drops_at_milestones() -> None:
    schedule = ScheduleConfig(name="step", milestones=[2, 3], gamma=0.1)
    lr = [schedule.factor(step, total_steps=40, steps_per_epoch=10) for step in range(40)]
    assert lr == [1.0] * 20 + [0.1] * 10 + [pytest.approx(0.01)] * 10


def test_streams_differ_by_every_part() -> None:
    seeds = {seed_of(seed, use, step, rank) for seed in (0, 1) for use in "ab" for step in (0, 1) for rank in (0, 1)}
    assert len(seeds) == 16
    assert seed_of(1, "a") == seed_of(1, "a") < 2**63


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_objectives_use_forward_once_and_attack_where_they_say(name: str) -> None:
    sizes: dict[str, Any] = {"layers": [(2, 3, 1, 1)], "hidden": [4], "theta": None, "img_size": 2, "in_chans": 3}
    model = ConvNet(num_classes=3, mean=(0.5,) * 3, std=(0.5,) * 3, **sizes)
    calls = {"forward": 0, "attack": 0}

    def through(measure: Any, *inputs: Any) -> Any:
        calls["forward"] += 1
        return measure(model, *inputs)

    def attack(images: Tensor, labels: Tensor) -> Tensor:
        calls["attack"] += 1
        return 1 - images

    probe = Probe(through, attack, model, ObjectiveConfig(name))
    OBJECTIVES[name](probe, torch.rand(5, 3, 2, 2), torch.zeros(5, dtype=torch.int64))
    assert calls == {"forward": 1, "attack": int(name in ("mart", "pgd_at", "trades"))}


def test_penalty_is_active_when_any_weight_is() -> None:
    assert not PenaltyConfig().active
    assert PenaltyConfig(lambda_k=1e-9).active


def test_nothing_that_changes_results_is_left_to_deepspeeds_defaults() -> None:
    from trainers.engine.engine import ds_config

    train = TrainConfig(epochs=1, batch_size=64, micro_batch_size=8, clip_grad=0.0)
    config = ds_config(train, DeepSpeedConfig(stage=2), world_size=2, weights=1000)
    assert config["gradient_clipping"] == 0.0
    assert config["gradient_accumulation_steps"] == 4
    assert config["zero_optimization"]["stage"] == 2


@pytest.mark.parametrize("name", ["dp_deit_ti", "dp_convit_ti", "dp_swin_t", "conv_4c3f", "spec_vit_digits"])
def test_weight_decay_spares_what_it_does_in_timm(name: str) -> None:
    """It spares vectors, the class token and positions, absolute or relative; with `decay_all` nothing."""
    from trainers.engine.engine import make_optimizer

    with torch.device("meta"):
        model = zoo.create_model(name)
    names = {id(weight): key for key, weight in model.named_parameters()}

    def spared(decay_all: bool) -> set[str]:
        groups = make_optimizer(model, OptimizerConfig("sgd", 1e-3, 0.1, decay_all)).param_groups
        assert {id(weight) for group in groups for weight in group["params"]} == names.keys()
        return {names[id(weight)] for group in groups if not group["weight_decay"] for weight in group["params"]}

    words = ("pos_embed", "cls_token", "relative_position_bias_table")
    expected = {key for key, weight in model.named_parameters() if weight.ndim < 2 or key.endswith(words)}
    assert spared(False) == expected
    assert spared(True) == set()


@pytest.mark.parametrize(("weights", "bucket"), [(1000, 1000), (10**10, 5 * 10**8)])
def test_no_more_is_set_aside_for_gradients_than_there_are_weights(weights: int, bucket: int) -> None:
    from trainers.engine.engine import ds_config

    config = ds_config(TrainConfig(epochs=1, batch_size=8), DeepSpeedConfig(stage=1), world_size=1, weights=weights)
    assert config["zero_optimization"]["reduce_bucket_size"] == bucket


def test_adamw_is_torchs_plain_one() -> None:
    from trainers.engine.engine import make_optimizer

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 40), nn.LayerNorm(40))
    oracle = copy.deepcopy(model)
    decay, free = ([p for p in oracle.parameters() if (p.ndim >= 2) is matrix] for matrix in (True, False))
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": free, "weight_decay": 0.0}]
    plain = torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.99), foreach=False, fused=False)
    ours = make_optimizer(model, OptimizerConfig("adamw", 0.01, 0.1, betas=(0.8, 0.99)))
    for _ in range(20):
        for mine, other in zip(model.parameters(), oracle.parameters(), strict=True):
            mine.grad = torch.randn_like(mine)
            other.grad = mine.grad.clone()
        ours.step()
        plain.step()
    for mine, other in zip(model.parameters(), oracle.parameters(), strict=True):
        torch.testing.assert_close(mine, other)


# --- files -----------------------------------------------------------------------------------------------------------


def write_checkpoint(run_dir: Path, step: int, mark: bool = True, batch: int = 2) -> Path:
    path = checkpoint.folder(run_dir) / checkpoint.tag(step)
    path.mkdir(parents=True)
    (path / RANK).write_bytes(b"x" * 100)
    sizes, digests = {RANK: 100}, {RANK: "0" * 64}
    saved = Saved(path.name, Position(step, 1, batch), 2, {"seed": 0}, sizes, digests)
    if mark:
        (path / checkpoint.MARK).write_text(saved.mark())
    return path


def test_other_ranks_go_on_with_what_was_left_of_an_epoch(tmp_path: Path) -> None:
    """2 ranks made 5 steps of 24 images, 3 ranks 2 steps, and 4 ranks continue; at an epoch's end nothing is left."""
    facts = {"train.batch_size": 24, "train.micro_batch_size": None, "data.workers": 2}
    first = Saved("step00000105", Position(105, 2, 5), 2, facts)
    assert first.position_for(2) == first.position
    second = first.position_for(3)
    assert second.readings == [Reading(2, 2, 12, 5)]
    assert second.batches(Reading(3, 2, 8, 0), 24) == 0
    at = second.after_step(50).after_step(50)
    third = replace(first, tag=checkpoint.tag(107), position=at, world_size=3)
    assert third.position_for(4).readings == [Reading(2, 2, 12, 5), Reading(3, 2, 8, 2)]
    (tmp_path / checkpoint.tag(107)).mkdir()
    (tmp_path / checkpoint.tag(107) / checkpoint.MARK).write_text(third.mark())
    assert checkpoint.read(tmp_path / checkpoint.tag(107)) == third
    checkpoint.check_position(third, 50, 200, 24)
    assert at.batches(Reading(3, 2, 8, 0), 24) == 2
    assert replace(first, position=Position(100, 2)).position_for(3) == Position(100, 2)


def test_the_newest_complete_checkpoint_is_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert checkpoint.newest(tmp_path) is None
    write_checkpoint(tmp_path, 5)
    write_checkpoint(tmp_path, 10)
    saved = checkpoint.newest(tmp_path)
    assert saved is not None
    assert saved.position == Position(step=10, epoch=1, batch_in_epoch=2)
    assert not caplog.records

    (write_checkpoint(tmp_path, 15) / RANK).write_bytes(b"x" * 99)  # shorter than it was
    write_checkpoint(tmp_path, 20, mark=False)  # killed before the mark
    saved = checkpoint.newest(tmp_path)
    assert saved is not None
    assert saved.tag == "step00000010"
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2


def test_a_difference_is_named(tmp_path: Path) -> None:
    config = {"train": {"epochs": 3, "log_every": 1}, "name": "a", "certify": {"images": 5}, "attack": {"eps": 0.1}}
    then = checkpoint.fingerprint(config, "digest")
    saved = Saved("step1", Position(1), world_size=2, fingerprint=json.loads(json.dumps(then)))
    free = {**config, "name": "b", "certify": {"images": 9}, "train": {"epochs": 3, "log_every": 9}}
    longer = {**config, "train": {"epochs": 4}}
    for same in (free, longer):
        checkpoint.check_same_run(saved, checkpoint.fingerprint(same, "digest"), tmp_path)
    for now, digest, words in (
        ({**config, "attack": {"eps": 0.2}}, "digest", "attack.eps=0.1"),
        (config, "other", "data shards"),
        ({**config, "new": 1}, "digest", "new=None"),
        ({**config, "train": {"epochs": 2}}, "digest", "train.epochs=3, .* give at least as many"),
    ):
        with pytest.raises(UserError, match=words):
            checkpoint.check_same_run(saved, checkpoint.fingerprint(now, digest), tmp_path)


def test_keys_that_a_checkpoints_version_lacked_had_their_defaults(tmp_path: Path) -> None:
    now = {"seed": 0, "data.erase": 0.0, "optimizer.layer_decay": 1.0, "train.sam_rho": 0.0}
    saved = Saved("step1", Position(1), 1, {"seed": 0})
    checkpoint.check_same_run(saved, now, tmp_path, defaults())
    with pytest.raises(UserError, match=r"with data.erase=0.0, but this command has data.erase=0.5"):
        checkpoint.check_same_run(saved, now | {"data.erase": 0.5}, tmp_path, defaults())


def test_rows_of_repeated_steps_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / ROWS
    path.write_text("".join(json.dumps({"step": step, "epoch": 0}) + "\n" for step in range(1, 6)) + '{"step": 3, "tor')
    with Report(tmp_path, total_steps=9, enabled=True).shown(first_step=3) as report:
        report.row(4, 0, {"loss": 1.0})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3, 4]
    with Report(tmp_path, total_steps=9, enabled=False).shown(first_step=3) as report:
        report.row(5, 0, {"loss": 1.0})
    assert len(path.read_text().splitlines()) == 4, "other ranks write nothing"
