"""Spaces, objectives, trials and results of a search, without a cluster; real ones run in test_tune_slow.py."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import count
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from certizoo import UserError, progress
from certizoo.config.compose import CONFIGS, compose_config
from certizoo.files import disk_errors
from certizoo.registry.server import credentials
from tests.tools.cases import mostly_slow
from tests.tools.full_disk import full_disk
from tests.tools.launching import ROOT
from trainers.job import checkpoint
from trainers.steps.report import Report
from tuning import __main__ as tune
from tuning import closing, objectives, search, spaces, trial
from tuning.live import Board, Line
from tuning.spaces import Parameter

NAMES = spaces.names()
FEW = ("msvp",)
DEFAULTS = compose_config("tune", [])


def asked(*arguments: str) -> search.Search:
    return tune.new_search(tune.parser(DEFAULTS).parse_args(arguments), DEFAULTS)


# --- spaces ---


@pytest.mark.parametrize("name", mostly_slow(NAMES, *FEW))
def test_every_space_composes_whatever_is_drawn(name: str) -> None:
    """All keys exist, values have the right type, and the certificate has the objective's radius."""
    wanted, random = asked("--space", name), Random(0)
    for _ in range(5):
        point = wanted.parameters.draw(random)
        overrides = wanted.trial_overrides("0001", point, Path("/r u'n"))
        config = compose_config(wanted.trainer, overrides)
        values = wanted.parameters.values(point)
        assert config["registry"]["tags"]["trial"] == f"{wanted.name}/0001"
        assert {key: config["registry"]["tags"][f"param.{key}"] for key in values} == {
            k: str(v) for k, v in values.items()
        }
        assert config["run_dir"] == "/r u'n"
        assert 0.1 in config["certify"]["eps"]
        for key, value in values.items():
            node = config
            for part in key.split("."):
                node = node[part]
            assert node == value


@pytest.mark.parametrize("name", mostly_slow(NAMES, *FEW))
def test_every_space_makes_models_that_have_a_certificate(name: str) -> None:
    import torch

    import zoo
    from certify import certify

    wanted = asked("--space", name)
    point = wanted.parameters.draw(Random(1))
    config = compose_config(wanted.trainer, wanted.trial_overrides("1", point, Path("r")))
    shape = {"num_classes": 10, "img_size": 8, "in_chans": 1}
    model = zoo.create_model(**(shape | config["model"])).eval()
    images = torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    result = certify(model, images, model(images).argmax(1), eps=1e-6, method=config["certify"]["method"])
    assert result.loss_B.isfinite().all()


def test_zero_is_drawn_as_often_as_said_and_the_rest_is_log_uniform() -> None:
    parameter, random = Parameter("log_uniform", 1e-6, 1e-2, zero=0.1), Random(0)
    values = [parameter.value(parameter.draw(random)) for _ in range(4000)]
    zeros = sum(value == 0 for value in values) / len(values)
    assert abs(zeros - 0.1) < 4 * math.sqrt(0.1 * 0.9 / 4000)
    above = [value for value in values if value]
    assert min(above) >= 1e-6
    assert max(above) <= 1e-2
    below_middle = sum(value < 1e-4 for value in above) / len(above)
    assert abs(below_middle - 0.5) < 4 * 0.5 / math.sqrt(len(above))


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ("{log_uniform: [0, 1]}", "above 0"),
        ("{uniform: [2, 1]}", "low < high"),
        ("{uniform: [0, 1], zero: 0.1}", "with log_uniform optionally zero"),
        ("{log_uniform: [0.1, 1], zero: 1}", "zero=1 .* below 1"),
        ("{gaussian: [0, 1]}", "no config key 'gaussian'"),
        ("{log_uniform: [1e-4, x]}", "2 numbers above 0"),
        ("5", "is a section"),
        ("{choice: []}", "choice="),
    ],
)
def test_a_wrong_space_is_named(tmp_path: Path, facts: str, words: str) -> None:
    (tmp_path / "space").mkdir()
    text = f"overrides: []\nwithout_model: []\nparameters:\n  a.b: {facts}\n"
    (tmp_path / "space" / "wrong.yaml").write_text(text)
    with pytest.raises(UserError, match=words) as error:
        spaces.load("wrong", tmp_path)
    assert "a.b" in str(error.value)


def test_every_space_is_a_lab_note() -> None:
    for name in NAMES:
        text = (CONFIGS / "space" / f"{name}.yaml").read_text()
        assert f"python tune.py --space {name}" in text


# --- objectives ---


def test_a_radius_is_found_as_people_write_it_and_added_where_it_is_missing() -> None:
    grid = [0.05, 0.1, 36 / 255]
    assert objectives.parse("certified_acc@0.141").radius(grid) == 36 / 255
    assert objectives.parse("certified_acc@0.1").radius([0.05, 0.1]) == 0.1
    assert objectives.grid_with(grid, [objectives.parse("pgd_acc@0.3"), objectives.parse("clean_acc")]) == [*grid, 0.3]
    certificate = {"clean": 0.9, "eps": grid, "accuracy": {"0.141176": {"certified": 0.3, "pgd": 0.6}}}
    read = [objectives.parse(text).value(certificate) for text in ("clean_acc", "pgd_acc@0.141", "certified_acc@0.141")]
    assert read == [0.9, 0.6, 0.3]


def test_a_trial_that_trains_counts_as_what_its_trainer_saw() -> None:
    wanted = [objectives.parse(text) for text in ("certified_acc@0.141", "clean_acc", "certified_acc@0.3")]
    row = {"clean_acc": 0.9, "pgd_acc": 0.8, "certified_acc.0.141176": 0.3, "pgd_acc.0.141176": 0.6}
    shown = objectives.with_attacked(wanted)
    assert [one.key for one in shown] == [
        "certified_acc@0.141", "pgd_acc@0.141", "clean_acc", "certified_acc@0.3", "pgd_acc@0.3",
    ]  # fmt: skip
    assert list(objectives.early(shown, row).values()) == [0.3, 0.6, 0.9], "nothing where it did not look"


def test_schedulers_compare_how_near_images_are_and_not_only_how_many() -> None:
    certified, clean = objectives.parse("certified_acc@0.141"), objectives.parse("clean_acc")
    row = {"clean_acc": 0.9, "certified_acc.0.141176": 0.25, "certified_near.0.141176": 0.3, "certified_images": 32.0}
    assert (certified.compared(row), clean.compared(row)) == (0.3, 0.9)
    assert certified.compared({"clean_acc": 0.9}) is None, "where it did not look"


def test_trials_are_compared_by_the_first_objective_on_images_of_their_own(tmp_path: Path, digits: Path) -> None:
    from tuning.driver import scheduler  # Ray takes seconds

    mine = asked("--space", "msvp", "--metric", "certified_acc@0.141", "--metric", "clean_acc",
                 "--storage", str(tmp_path), "--", f"data.root={digits}")  # fmt: skip
    config = compose_config("adv_train", mine.overrides)
    assert (config["train"]["certify_images"], config["train"]["certify_eps"]) == (32, [0.141])
    assert config["certify"]["headline_eps"] == 0.141
    found = search.find_data(mine)
    assert compose_config("adv_train", found.overrides)["certify"]["images"] == 360 - 32
    assert search.find_data(found) == found, "a resumed search is the same"
    for name in ("asha", "pbt"):
        assert vars(scheduler(replace(mine, scheduler=name)))["_metric"] == objectives.COMPARED


@pytest.mark.parametrize("epochs", [1, 3, 12, 17])
def test_trials_are_looked_at_where_schedulers_compare_them(epochs: int) -> None:
    from tuning.driver import scheduler  # Ray takes seconds

    mine = asked("--space", "msvp", "--", f"train.epochs={epochs}")
    every = compose_config("adv_train", mine.overrides)["train"]["certify_every"]
    (bracket,) = vars(scheduler(replace(mine, scheduler="asha")))["_brackets"]
    rungs = [rung for rung, _ in bracket._rungs]
    assert rungs
    assert all(rung % every == 0 for rung in rungs)
    assert vars(scheduler(replace(mine, scheduler="pbt")))["_perturbation_interval"] % every == 0


@pytest.mark.parametrize("images", ["certify_images", "eval_images"])
def test_a_search_that_sees_nothing_of_its_trials_is_refused(images: str) -> None:
    """Otherwise a trial had nothing to report, and ended in an IndexError after its certificate."""
    with pytest.raises(UserError, match=f"train.{images} .*set it above 0"):
        asked("--space", "msvp", "--", f"train.{images}=0")


def test_a_recipe_that_trains_unseen_is_seen_in_a_search() -> None:
    mine = asked("--space", "certified", "--", "+model=cert_gpsa_vit_c10", "data=digits")
    assert compose_config("adv_train", ["+model=cert_gpsa_vit_c10"])["train"]["eval_images"] == 0
    assert compose_config("adv_train", mine.overrides)["train"]["eval_images"] > 0


def test_a_search_that_asks_for_clean_accuracy_alone_looks_at_nothing_else() -> None:
    config = compose_config("adv_train", asked("--space", "msvp", "--metric", "clean_acc").overrides)
    assert config["train"]["certify_images"] == 0


def test_a_search_in_linf_certifies_the_radii_of_linf_and_its_own() -> None:
    metric = "certified_acc@0.00784"
    mine = asked("--space", "msvp", "--metric", metric, "--", "certify.norm=linf", "certify.eps=null")
    config = compose_config("adv_train", mine.overrides)["certify"]
    assert config["norm"] == "linf"
    assert config["eps"] == pytest.approx([k / 255 for k in (1, 2, 4, 8)])
    assert config["headline_eps"] == pytest.approx(2 / 255)


@pytest.mark.parametrize("text", ["accuracy", "certified_acc", "certified_acc@", "pgd_acc@-1", "clean_acc@0.1"])
def test_a_wrong_metric_says_what_is_right(text: str) -> None:
    with pytest.raises(UserError, match="certified_acc@EPS"):
        objectives.parse(text)


# --- the command ---


def test_what_the_person_writes_wins_and_a_model_of_their_own_replaces_the_digits() -> None:
    mine = asked("--space", "msvp", "--metric", "certified_acc@0.02", "--", "+model=lofast_vit_c10", "data=cifar10")
    config = compose_config("adv_train", mine.overrides)
    assert (config["model"]["name"], config["data"]["name"]) == ("lofast_vit_c10", "cifar10")
    assert config["certify"]["headline_eps"] == 0.02
    assert Path(config["data"]["root"]).is_absolute()
    assert config["penalty"]["lambda_q"] > 0
    assert mine.epochs == config["train"]["epochs"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "add --space NAME"),
        (["--space", "msv"], "no space .msv.; nearest: msvp, "),
        (["--space", "msvp", "--", "train.epcohs=3"], "nearest: train.epochs"),
        (["--space", "msvp", "--", "certify.enabled=false"], "a search needs certificates"),
        (["--space", "msvp", "--", "registry.uri=http://me:secret@h:1"], "set MLFLOW_TRACKING_URI"),
        (["--space", "msvp", "--scheduler", "pbt", "--search", "optuna"], "remove --search"),
    ],
)
def test_errors_come_before_anything_is_started(arguments: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        asked(*arguments)


def test_a_search_is_read_back_as_it_was_begun(tmp_path: Path) -> None:
    begun = asked("--space", "l2", "--storage", str(tmp_path), "--name", "x", "--resources-per-trial", "CPU=2,GPU=1")
    begun.save()
    assert search.load(search.newest(tmp_path)) == begun
    assert begun.ranks == 1
    with pytest.raises(UserError, match="holds no search"):
        search.load(tmp_path / "y")


def test_help_is_for_people() -> None:
    shown = subprocess.run(
        [sys.executable, str(ROOT / "tune.py"), "--help"], capture_output=True, text=True, timeout=120
    )
    assert shown.returncode == 0
    assert all(option in shown.stdout for option in ("--num-samples", "--metric", "--resume", "KEY=VALUE", "msvp"))


# --- trials ---


def test_an_adopted_checkpoint_is_of_this_trial_and_only_searched_keys_may_differ(tmp_path: Path) -> None:
    """A population-based search hands over another trial's weights with this trial's parameters."""
    theirs = tmp_path / "theirs"
    folder = theirs / "checkpoints" / checkpoint.tag(12)
    folder.mkdir(parents=True)
    prints = {"penalty.lambda_q": 1e-3, "model.depth": 2}
    position = {"step": 12, "epoch": 1, "batch_in_epoch": 0, "before": []}
    mark = {"format": checkpoint.FORMAT, "position": position, "world_size": 1, "files": {}, "sha256": {}}
    mark |= {"fingerprint": prints}
    (theirs / trial.STATE).write_text("theirs")
    (folder / checkpoint.MARK).write_text(json.dumps(mark))
    for name in trial.RESULTS:  # of a finished trial, as an object store keeps it
        (theirs / name).mkdir()
    trial.adopt(theirs, tmp_path / "mine", {"penalty.lambda_q": 5e-4})
    saved = checkpoint.newest(tmp_path / "mine")
    assert saved is not None
    assert saved.fingerprint == {"penalty.lambda_q": 5e-4, "model.depth": 2}
    checkpoint.check_same_run(saved, saved.fingerprint, tmp_path)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["checkpoints"], "nothing else is of this one"
    with pytest.raises(UserError, match=r"model\.depth"):
        checkpoint.check_same_run(saved, saved.fingerprint | {"model.depth": 3}, tmp_path)
    trial.adopt(theirs, tmp_path / "same", {"penalty.lambda_q": 1e-3})
    kept = (tmp_path / "same" / trial.STATE).read_text()
    assert kept == "theirs", "a restart of the trial itself goes on in its MLflow run"


def test_progress_is_an_evaluation_with_the_checkpoint_after_it(tmp_path: Path) -> None:
    assert trial.progress(tmp_path) is None
    rows = [
        {"step": 12, "epoch": 0, "clean_acc": 0.5},
        {"step": 20, "epoch": 1, "loss": 1.0},
        {"step": 24, "epoch": 1, "clean_acc": 0.6},
    ]
    (tmp_path / trial.ROWS).write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 30, "cl')
    assert trial.progress(tmp_path) is None, "no checkpoint yet"
    (tmp_path / trial.STATE).write_text("{}")
    for step in (12, 24):
        folder = tmp_path / "checkpoints" / checkpoint.tag(step)
        folder.mkdir(parents=True)
        (folder / "weights").write_text(str(step))
        (folder / checkpoint.MARK).write_text("{}")
        found = trial.progress(tmp_path)
        assert found is not None
        assert (found.row["step"], found.checkpoint) == (step, folder)
    assert found is not None
    kept = trial.snapshot(found, tmp_path, tmp_path / "kept")
    assert (kept / "checkpoints" / checkpoint.tag(24) / "weights").read_text() == "24"
    assert {path.name for path in kept.iterdir()} == {"checkpoints", trial.ROWS, trial.STATE}


def test_a_trial_is_told_of_the_registry_by_environment_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command line is visible to `ps`, and the configuration goes to MLflow; all of it: test_password_slow.py."""
    from tuning import driver

    begun: list[trial.Command] = []

    def train(command: trial.Command, *given: Any) -> None:
        begun.append(command)
        raise trial.Failed("seen")

    monkeypatch.setattr(trial, "train", train)
    monkeypatch.setattr(driver.tune, "get_context", lambda: SimpleNamespace(get_trial_id=lambda: "0001"))
    monkeypatch.setattr(driver.tune, "get_checkpoint", lambda: None)
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "h0rse")
    around = driver.Surroundings(credentials.environment("http://anna:c0rrect@h:5000"), "session")
    wanted = asked("--space", "msvp", "--storage", str(tmp_path), "--name", "x")
    (tmp_path / "x" / "trials" / "0001").mkdir(parents=True)
    with pytest.raises(trial.Failed):
        driver.trial(wanted.parameters.draw(Random(0)), wanted, around)
    (command,) = begun
    given = {"MLFLOW_TRACKING_URI": "http://anna:c0rrect@h:5000", "MLFLOW_TRACKING_PASSWORD": "h0rse"}
    assert command.variables == given
    config = compose_config(wanted.trainer, command.overrides)
    shown = [*command.overrides, json.dumps(config), repr(command), repr(around)]
    assert not [text for text in shown if "c0rrect" in text or "h0rse" in text]


@pytest.mark.slow
@pytest.mark.parametrize("given", [{}, {"CUDA_VISIBLE_DEVICES": "5"}])
def test_a_single_rank_is_told_what_the_launcher_tells_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, str]
) -> None:
    """Compare command line and environment; `given` is Ray's, of a trial with a GPU.

    Variables that importing deepspeed sets are set by the rank's own import.
    """
    for key in trial.OF_ANOTHER_GROUP:
        monkeypatch.setenv(key, "7")
    for key, value in given.items():
        monkeypatch.setenv(key, value)
    monkeypatch.delenv("_MLFLOW_TELEMETRY_SESSION_ID", raising=False)  # an import of mlflow in this process set it
    script = tmp_path / "tell.py"
    script.write_text("import json, os, sys\nprint(json.dumps([sys.orig_argv, dict(os.environ)]))\n")
    command = trial.Command(script, ["a=b", "c='d e'"], 1, {"MLFLOW_TRACKING_URI": "http://u"})
    with trial.launched(command, tmp_path / "alone.log") as process:
        assert process.wait(60) == 0
    monkeypatch.setattr(trial, "alone", trial.by_launcher)
    with trial.launched(command, tmp_path / "launcher.log") as process:
        assert process.wait(120) == 0
    said = [(tmp_path / f"{name}.log").read_text().splitlines() for name in ("alone", "launcher")]
    (our_words, ours), (words, theirs) = (json.loads(next(line for line in log if line[0:2] == "[[")) for log in said)
    assert our_words == words
    assert ours.pop("MASTER_PORT").isdigit()
    assert theirs.pop("MASTER_PORT").isdigit()
    assert {key: theirs.get(key) for key in ours} == ours
    assert set(theirs) - set(ours) <= {"PYTORCH_NVML_BASED_CUDA_CHECK", "_MLFLOW_TELEMETRY_SESSION_ID"}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("way", ["leave", "kill the worker", "kill as Ray does"])
def test_no_rank_outlives_its_trial(tmp_path: Path, way: str, ranks: int) -> None:
    """Ranks and loaders would sleep for ten minutes. Ray kills the children of a worker that ends."""
    script = tmp_path / "sleeper.py"
    script.write_text(
        "import os, subprocess, time\n"
        "loader = subprocess.Popen(['sleep', '600'])\n"
        "open(f'rank{os.environ[\"RANK\"]}', 'w').write(f'{os.getpid()} {loader.pid}')\n"
        "time.sleep(600)\n"
    )
    code = (
        "import time; from pathlib import Path; from tuning import trial\n"
        f"with trial.launched(trial.Command(Path('{script}'), [], {ranks}), Path('{tmp_path}/run-1.log')) as child:\n"
        f"    Path('{tmp_path}/child').write_text(str(child.pid))\n"
        f"    while len(list(Path('{tmp_path}').glob('rank?'))) < {ranks}: time.sleep(0.1)\n"
        f"    Path('{tmp_path}/up').touch(); time.sleep({0 if way == 'leave' else 600})\n"
    )
    worker = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    deadline = time.monotonic() + 240
    while not (tmp_path / "up").exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    if way == "kill as Ray does":
        os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)
    if way != "leave":
        os.kill(worker.pid, signal.SIGKILL)
    worker.wait(60)
    pids = [int(pid) for path in tmp_path.glob("rank?") for pid in path.read_text().split()]
    assert len(pids) == 2 * ranks
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, "ranks are left"
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("log", "words"),
    [
        ("x\nerror: step 3: loss is nan\n[launch.py:1] killing\n", "step 3: loss is nan"),
        ("Killed\n", "Killed"),
        ("", "nothing"),
    ],
)
def test_a_failed_trial_says_why(tmp_path: Path, log: str, words: str) -> None:
    (tmp_path / "run-1.log").write_text(log)
    assert words in trial.why(tmp_path / "run-1.log", 2)


# --- the results of a search ---


def slow_front(values: np.ndarray) -> list[bool]:
    """Compute the front from its definition, as loops."""
    kept = []
    for mine in values:
        beaten = any(all(o >= m for o, m in zip(other, mine, strict=True)) and any(other > mine) for other in values)
        kept.append(not beaten)
    return kept


@pytest.mark.parametrize("objectives_count", [1, 2, 3])
def test_the_front_is_what_the_definition_says(objectives_count: int) -> None:
    values = np.random.default_rng(0).integers(0, 5, (60, objectives_count)) / 4
    assert closing.front(values).tolist() == slow_front(values)
    assert closing.front(values).any()


@pytest.mark.parametrize("name", mostly_slow(NAMES, *FEW))
@pytest.mark.parametrize("metric", [("certified_acc@0.1",), ("clean_acc", "pgd_acc@0.1", "certified_acc@0.1")])
def test_files_of_a_search(tmp_path: Path, name: str, metric: tuple[str, ...]) -> None:
    arguments = [word for text in metric for word in ("--metric", text)]
    wanted = asked("--space", name, "--storage", str(tmp_path), "--name", "x", *arguments)
    wanted.save()
    board, random = Board(wanted.parameters, wanted.metric, 4, wanted.epochs), Random(0)
    for index in range(4):
        point, key = wanted.parameters.draw(random), f"abc_{index:05d}"
        board.started(key, point)
        figures = {name: random.random() for name in board.shown}
        board.reported(key, point, figures | {"epoch": 12, "certified": int(index != 2), "time_total_s": 30.0})
        board.ended(key)
    board.failed("abc_00003", point, "loss is <nan>")
    page = closing.write(wanted, board).read_text()
    rows = pd.read_csv(wanted.folder / closing.TABLE)
    assert list(rows["state"]) == ["certified", "certified", "stopped early", "failed"]
    assert page.count("data:image/png;base64") == 2
    assert "loss is &lt;nan&gt;" in page
    assert "4 of 4 trials" in str(board.table().title)


def test_a_log_gets_a_line_every_ten_seconds(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """Also while no trial ends; rows of a training and its evaluation do the same."""
    board, report = Board(spaces.load("msvp"), ["clean_acc"], 9, 12), Report(Path(), 100, enabled=True)
    board.lines["t_1"] = Line("running", figures={"clean_acc": 0.5})
    begun = "0 of 9 trials ended, 1 running; best clean_acc 50.0%, on a few images\nstep 7/100 "
    for seconds, wanted in ((60.0, ""), (0.0, begun)):
        monkeypatch.setattr(progress, "LINE_SECONDS", seconds)
        board.alive()
        report.advance(7)
        printed = capsys.readouterr().out
        assert printed.startswith(wanted)
        assert bool(printed) == bool(wanted)
    board.lines["t_2"] = Line("certified", figures={"clean_acc": 0.4})
    board.alive()
    assert capsys.readouterr().out == "1 of 9 trials ended, 1 running; best clean_acc 40.0%\n"


def test_the_board_of_a_long_search_shows_the_best() -> None:
    board = Board(spaces.load("msvp"), ["clean_acc"], 1000, 12)
    for index in range(200):
        line = board.lines[f"abc_{index:05d}"] = Line(values=board.space.values(board.space.draw(Random(index))))
        line.state = "certified" if index % 2 else "running"
        line.figures = {"clean_acc": index / 200}
    table = board.table()
    assert list(table.columns[0].cells) == [f"{index:05d}" for index in range(199, 139, -2)]
    assert "100 of 1000 trials, 100 running; the 30 best" in str(table.title)


@pytest.mark.parametrize("edited", ["another choice", "another key", "no file"])
def test_a_search_keeps_the_space_with_which_it_began(
    edited: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trials of the old space are listed, plotted and continued after somebody has edited the file."""
    name = next(name for name in NAMES if any(p.options for p in spaces.load(name).parameters.values()))
    begun = asked("--space", name, "--storage", str(tmp_path), "--name", "x")
    begun.save()
    content = spaces.read(name)
    key = next(key for key, parameter in begun.parameters.parameters.items() if parameter.options)
    content["parameters"] = {key if edited == "another choice" else "model.depth": {"choice": [977]}}

    def read(name: str, configs: Path = CONFIGS) -> dict[str, Any]:
        if edited == "no file":
            raise UserError(f"no space {name}")
        return content

    monkeypatch.setattr(spaces, "read", read)
    resumed = search.load(tmp_path / "x")
    assert resumed == begun
    assert resumed.parameters == begun.parameters
    board, point = Board(resumed.parameters, resumed.metric, 1, resumed.epochs), resumed.parameters.draw(Random(0))
    assert resumed.trial_overrides("1", point, tmp_path) == begun.trial_overrides("1", point, tmp_path)
    board.started("a_1", point)
    board.reported("a_1", point, dict.fromkeys(board.shown, 0.5) | {"epoch": 12, "certified": 1, "time_total_s": 3.0})
    board.ended("a_1")
    assert "certified" in closing.write(resumed, board).read_text()


def test_a_search_of_which_nothing_finished_leaves_its_page_too(tmp_path: Path) -> None:
    wanted = asked("--space", "msvp", "--storage", str(tmp_path), "--name", "x")
    wanted.save()
    board = Board(wanted.parameters, wanted.metric, 1, wanted.epochs)
    board.failed("a", wanted.parameters.draw(Random(0)), "why not")
    assert "why not" in closing.write(wanted, board).read_text()


# --- messages ---


def test_what_its_trainer_refuses_is_not_said_to_begin_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tune retries every failure."""
    from tuning import driver

    watch = driver.Watch(Board(spaces.load("msvp"), ["clean_acc"], 1, 1), asked("--space", "msvp"))
    point = watch.search.parameters.draw(Random(0))
    ends = {"Refused: no such model (exit status 2)": "", "Failed: killed (signal 9)": "killed (signal 9)", "": "lost"}
    for index, (line, told) in enumerate(ends.items()):
        error = tmp_path / str(index)
        error.write_text(f"Traceback\n  File\ntuning.trial.{line}\n" if line else "")
        one: Any = SimpleNamespace(trial_id=str(index), config=point, error_file=str(error))
        watch.on_trial_start(0, [], one)
        capsys.readouterr()
        watch.on_trial_recover(0, [], one)
        said = capsys.readouterr().out
        assert told in said
        assert bool(said) == bool(told)
    watch.on_trial_error(0, [], SimpleNamespace(trial_id="0", config=point, error_file=str(tmp_path / "0")))
    assert "no such model (exit status 2)" in capsys.readouterr().out


def test_the_command_that_goes_on_names_the_storage_where_it_is_not_the_usual_one() -> None:
    assert tune.resuming(asked("--space", "msvp", "--name", "x")) == "python tune.py --resume x"
    elsewhere = asked("--space", "msvp", "--name", "x", "--storage", "/mnt/a b")
    assert tune.resuming(elsewhere) == "python tune.py --resume x --storage '/mnt/a b'"


# --- one search a folder ---


@pytest.mark.parametrize(
    "name",
    mostly_slow(
        [
            "x,y",
            "a b",
            "it's",
            "a{b}",
            "[a]",
            "$x",
            "a:b",
            "a\\b",
            "a\\'b",
            'a"b',
            "../../x",
            "/x",
            ".x",
            "x" * 197,
            "é",
        ],
        *("x,y", "../../x", "/x", "é"),
    ),
)
def test_a_name_that_is_no_folder_of_a_trial_is_refused_at_once(name: str) -> None:
    with pytest.raises(UserError, match="is not a valid folder name"):
        asked("--space", "l2", "--name", name)


@pytest.mark.parametrize("name", mostly_slow(("1e3", "null", "true", "a=b", "a.b", "x@y+z", "0x1"), "1e3", "a=b"))
def test_a_name_reaches_the_trial_as_it_was_typed(name: str) -> None:
    wanted = asked("--space", "l2", "--name", name)
    point = wanted.parameters.draw(Random(0))
    config = compose_config(wanted.trainer, wanted.trial_overrides("0001", point, Path("r")))
    assert config["name"] == f"{name}-0001"
    assert config["registry"]["tags"]["search"] == name


def test_with_an_object_store_run_folders_are_the_nodes_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    wanted = asked("--space", "l2", "--name", "x", "--storage", "s3://bucket/searches")
    assert (wanted.store, wanted.folder) == ("s3://bucket/searches", tmp_path / "runs" / "tune" / "x")
    with pytest.raises(UserError, match="set keys in the environment"):
        asked("--space", "l2", "--storage", "s3://anna:secret@bucket/searches")
    with pytest.raises(UserError, match="there is no search in"):
        tune.main_search(tune.parser(DEFAULTS).parse_args(["--resume", "--storage", "s3://bucket/searches"]), DEFAULTS)


HOLD = """
import sys, time
from pathlib import Path
from certizoo.locks import sole_writer
with sole_writer(Path(sys.argv[1]), "this search", "x"):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("arguments", [("--space", "l2", "--name", "mine"), ("--resume", "mine"), ("--resume",)])
def test_a_second_driver_of_a_search_is_refused_at_once(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search is running; the second driver starts it anew, or resumes it by name or as the newest."""
    monkeypatch.setattr(tune, "run", lambda asked, resume: pytest.fail("it was started"))
    asked("--space", "l2", "--name", "mine", "--storage", str(tmp_path)).save()
    command = [sys.executable, "-c", HOLD, str(tmp_path / "mine")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        first.stdout.readline()
        before = sorted(tmp_path.rglob("*"))
        try:
            with pytest.raises(UserError, match=f"another process writes this search here .process {first.pid} "):
                tune.main_search(tune.parser(DEFAULTS).parse_args([*arguments, "--storage", str(tmp_path)]), DEFAULTS)
        finally:
            first.kill()
    assert sorted(tmp_path.rglob("*")) == before


def test_a_search_that_ended_before_it_began_leaves_its_name_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = tune.parser(DEFAULTS).parse_args(["--space", "l2", "--name", "mine", "--storage", str(tmp_path)])

    def refused(asked: search.Search, resume: bool) -> int:
        raise UserError("no data")

    monkeypatch.setattr(tune, "run", refused)
    for _ in range(2):
        with pytest.raises(UserError, match="no data"):
            tune.main_search(args, DEFAULTS)
    asked("--space", "l2", "--name", "mine", "--storage", str(tmp_path)).save()
    with pytest.raises(UserError, match="finish that search with --resume mine"):
        tune.main_search(args, DEFAULTS)


def test_a_full_disk_leaves_a_search_whole_and_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every write at the beginning and end of a search fails in turn."""
    wanted = asked("--space", "l2", "--name", "mine", "--storage", str(tmp_path))
    wanted.save()
    board = Board(wanted.parameters, wanted.metric, 1, wanted.epochs)
    for name in ("a_0001", "a_0002"):
        board.started(name, wanted.parameters.draw(Random(1)))
        board.reported(
            name, wanted.parameters.draw(Random(1)), {"certified": 1, "clean_acc": 0.5, wanted.metric[0]: 0.2}
        )
        board.ended(name)
    for after in count():
        refusal = None
        with full_disk(tmp_path, after) as disk:
            try:
                with disk_errors("make room"):
                    wanted.save()
                    closing.write(wanted, board)
            except UserError as error:
                refusal = error
        assert search.load(wanted.folder) == wanted
        assert not list(wanted.folder.glob("*.part"))
        if not disk.full:
            break
        assert refusal or after > len(disk.seen) - 3, disk.seen  # the last file is written before it is renamed
    assert after > 10
    assert {path.name for path in wanted.folder.iterdir()} >= {closing.PAGE, closing.TABLE, closing.PARETO}
