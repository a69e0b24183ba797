"""Every experiment is a lab note whose command composes to its file's settings; the reduced tables are complete."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import zoo
from benchmarks import experiments, sentences, trainings
from benchmarks.experiments import markdown, run
from benchmarks.paper_tables import TABLES, certified, of_sentences
from benchmarks.trainings import ATTACKS
from certizoo import UserError
from certizoo.config import recipes
from certizoo.config.compose import CONFIGS, compose_config
from certizoo.config.schema import section_of
from tests.tools.cases import mostly_slow
from tests.tools.config_files import files, note, training
from trainers.job.auto_settings import resolve_auto
from trainers.settings import ConstrainConfig, MasksConfig, MixConfig, ObjectiveConfig, OptimizerConfig, TrainConfig
from zoo.models.overview import tiny_options

FILES = files("experiment")
ROWS = recipes.table("experiment", CONFIGS)
TABLE = CONFIGS / "experiments.yaml"


@pytest.mark.parametrize("path", mostly_slow(FILES, *list(FILES)[::4]), ids=lambda path: path.stem)
def test_the_command_of_the_note_composes_to_what_the_file_says(path: Path) -> None:
    assert training(path), "no command"
    for entry, overrides in training(path):
        assert f"+experiment={path.stem}" in overrides
        config = compose_config(entry, overrides)
        assert config["name"].startswith(f"{path.stem}-{config['model']['name']}")
        assert config["data"]["root"] == "SHARDS"
        given = [word.partition("=")[0] for word in overrides]
        check_fields(
            config, {key: value for key, value in yaml.safe_load(path.read_text()).items() if key not in given}
        )


@pytest.mark.parametrize("name", mostly_slow(ROWS, *list(ROWS)[::4]))
def test_a_row_composes_by_the_command_of_its_table(name: str) -> None:
    kind = next((table for table in ("table7", "table8", "table9") if table in name), "deit")
    entry, overrides = next(each for each in training(TABLE) if kind in each[1][0])
    config = compose_config(entry, [f"+experiment={name}", *overrides[1:]])
    assert config["name"] == f"{name}-{config['model']['name']}-s0"
    assert config["optimizer"]["lr_batch"] == config["train"]["batch_size"], "lr is for this batch"
    check_fields(config, ROWS[name])


def check_fields(config: dict[str, Any], said: dict[str, Any]) -> None:
    """Check that the file's settings are the ones that run, and that every group has its type."""
    for group, values in said.items():
        if isinstance(values, dict):
            assert {key: config[group][key] for key in values} == values, group
    section_of(TrainConfig, resolve_auto(config, 1, None)[0]["train"], "train")
    for cls, group in ((ObjectiveConfig, "objective"), (OptimizerConfig, "optimizer"), (MixConfig, "mix")):
        section_of(cls, config[group], group)
    section_of(MasksConfig, config["masks"], "masks")
    if "constrain" in config:
        section_of(ConstrainConfig, config["constrain"], "constrain")
    shape = {"num_classes": config["data"]["num_classes"], "img_size": config["data"]["img_size"]}
    if config["data"].get("kind") != "text":
        shape["in_chans"] = config["data"]["channels"]
    with torch.device("meta"):
        zoo.create_model(**(shape | config["model"] | tiny_options(config["model"]["name"])))
        zoo.model_options(**(shape | config["model"]))


def test_an_experiment_names_its_source_and_what_was_run() -> None:
    for path in [*FILES, TABLE]:
        assert re.search(r"SpecFormer|CoViT|CertViT|LoFAST|et al\.", note(path)), path
        assert re.search(r"[Nn]ot\s+(#\s+)?run|None was run|results", note(path)), path


def test_a_model_can_be_swapped() -> None:
    config = compose_config("adv_train", ["+experiment=specformer_cifar10_adv", "model=l2_deit_ti"])
    assert (config["model"]["name"], config["model"]["patch_size"]) == ("l2_deit_ti", 4)
    assert config["penalty"]["lambda_q"] == 0
    assert compose_config("adv_train", ["+experiment=specformer_cifar10_adv"])["penalty"]["lambda_q"] > 0


def test_all_protocols_are_there() -> None:
    names = {path.stem for path in FILES} | set(ROWS)
    for table in (7, 8, 9):
        assert {f"certvit_table{table}_{data}" for data in ("mnist", "cifar10", "cifar100", "tin")} <= names
    assert len([name for name in names if name.startswith("certvit_") and "table" not in name]) == 14
    assert {"mo_cifar10", "specformer_imagenet_adv", "lofast_w128", "covit_tiny", *TABLES} <= names


# the reduced tables --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(TABLES))
def test_every_row_of_a_table_composes(name: str) -> None:
    table = TABLES[name]
    for row in table.rows:
        config = compose_config(table.script, [f"+experiment={name}", f"model={row.model}", "seed=7", *row.options])
        assert config["name"].startswith(f"{name}-{row.model}")
        assert config["name"].endswith("-s7")
        assert len(row.published) == (0 if table.measure is of_sentences else len(table.columns))
        assert (config["penalty"]["lambda_q"] > 0) == row.model.startswith("spec_")
        if table.measure is certified:
            assert config["certify"]["enabled"]
            assert [f"{eps:g}" for eps in config["certify"]["eps"]] == list(table.columns)
        elif table.measure is of_sentences:
            cap = float(row.options[0].partition("=")[2])
            assert [config["model"]["attention"][f"{weight}_cap"] for weight in "vo"] == [cap, cap]
            assert [f"{eps:g}" for eps in config["certify"]["eps"]] == list(sentences.EPS)
            assert config["certify"]["images"] == table.images
        else:
            for column in set(table.columns) - {"clean"}:
                assert ATTACKS[column].eps == pytest.approx(config["attack"]["eps"])
    sizes = 3 if table.measure is certified else 4 if table.measure is of_sentences else 5
    assert len({row.model for row in table.rows}) == sizes
    assert len({(row.model, row.options) for row in table.rows}) == len(table.rows)


@pytest.fixture
def reduced(real_data: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Make a table of one row and two seeds below `tmp_path`.

    Return the overrides that train it in two steps on real images.
    """
    table = replace(TABLES["table1_small"], rows=TABLES["table1_small"].rows[:1], seeds=(0, 1), images=50)
    monkeypatch.setattr(experiments, "TABLES", {"table1_small": table})
    monkeypatch.setattr(trainings, "ROOT", tmp_path)
    monkeypatch.setattr(experiments, "RESULTS", tmp_path)
    monkeypatch.setattr(
        experiments, "record", lambda name, facts: (tmp_path / f"{name}.json").write_text(json.dumps(facts))
    )
    monkeypatch.setattr(trainings, "BATCH", 50)
    (tmp_path / "trainers").symlink_to(Path(__file__).parents[2] / "trainers")
    words = [f"data.root={real_data}", "data.train=cifar10-train-000000.tar", "data.test=cifar10-test-000000.tar"]
    words += ["model.depth=1", "train.batch_size=64", "train.max_steps=2", "train.precision=fp32"]
    return [*words, f"run_dir={tmp_path}/runs/s${{seed}}"]


def said(folder: Path) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((folder / "experiments_table1_small.json").read_text())
    return facts


def test_a_row_is_trained_for_each_seed(reduced: list[str], tmp_path: Path) -> None:
    """The trainer runs two seeds at once."""
    run("table1_small", reduced, at_once=2)
    facts = said(tmp_path)
    assert facts["command"].startswith(
        "make experiment NAME=table1_small ARGS='--at-once 2 data.root=SHARDS data.train="
    )
    assert facts["runs"] == "2 of 2"
    assert facts["rows"][0]["training_images_per_s"] > 0
    assert [set(one) for one in facts["rows"][0]["seeds"]] == [{"clean", "FGSM", "PGD-2"}] * 2
    assert facts["rows"][0]["seeds"][0] != facts["rows"][0]["seeds"][1]
    assert " +- " in (tmp_path / "experiments_table1_small.md").read_text()


@pytest.mark.slow
def test_a_row_is_trained_once_and_by_one_configuration(reduced: list[str], tmp_path: Path) -> None:
    run("table1_small", reduced)
    first, steps = said(tmp_path), (tmp_path / "runs" / "s1" / "metrics.jsonl").read_text()
    run("table1_small", reduced)
    assert said(tmp_path)["rows"] == first["rows"]
    assert (tmp_path / "runs" / "s1" / "metrics.jsonl").read_text() == steps
    with pytest.raises(UserError, match=f"s[01] did not finish; fix the error in {tmp_path}/runs/s[01].log"):
        run("table1_small", [*reduced, "model.depth=2"], at_once=2)
    assert "was trained with model.depth=1" in (tmp_path / "runs" / "s0.log").read_text()
    assert said(tmp_path)["rows"] == first["rows"]


def test_the_markdown_has_ours_beside_the_published() -> None:
    table = TABLES["table2_deit_ti"]
    rows = [
        {"method": row.method, "model": row.model, "ours": dict.fromkeys(table.columns, 12.3),
         "deviation": dict.fromkeys(table.columns), "seeds": [{}],
         "published": dict(zip(table.columns, row.published, strict=True))}
        for row in table.rows
    ]  # fmt: skip
    text = markdown(table, rows)
    assert text.count("12.3 / ") == 15
    assert "12.3 / 71.71" in text


MADE = re.compile(r"^#\s+make experiment NAME=(\S+) ARGS='(.*?)'", re.MULTILINE)


@pytest.mark.parametrize(("name", "words"), [made for path in FILES for made in MADE.findall(path.read_text())])
def test_the_command_of_a_table_is_taken(name: str, words: str) -> None:
    """The options stand between the name and the overrides, where make passes them."""
    options = experiments.asked([name, *words.split()])
    assert options.name == name in TABLES
    assert options.overrides[-1] == "data.root=SHARDS"
    assert options.at_once == (int(words.split()[1]) if "--at-once" in words else 1)


def test_an_unknown_table_is_one_line() -> None:
    with pytest.raises(UserError, match="table2_deit_ti"):
        run("table9", [])
