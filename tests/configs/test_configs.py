"""Every file under configs/ composes and is documented; every model of the zoo composes, with a file or without."""

import re
import shutil
from dataclasses import make_dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch

import zoo
from certify.rows.arguments import settings_of
from certify.stage.settings import Settings
from certizoo import UserError
from certizoo.config.compose import CONFIGS, compose_config
from certizoo.config.recipes import row, table
from certizoo.config.schema import section_of
from tests.tools.config_files import COMMAND, files, note, one_of_each_shape, recipe, training
from trainers.job.stages import prepare_first
from zoo.attention import variants
from zoo.models.overview import tiny_options

ROOT = CONFIGS.parent
ALL = sorted(CONFIGS.rglob("*.yaml"))
RECIPES = [path.stem for path in files("model")]
# Tested elsewhere: in test_experiments.py, test_tune.py and test_protocols.py, and models below.
NOT_CHOSEN = ("experiment", "space", "protocol", "model", CONFIGS.name)
CALLED = {"names": "+model", "experiments": "+experiment", "tune": "tune.py", "stage": "certify"}


# --- every file ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ALL, ids=lambda path: str(path.relative_to(CONFIGS)))
def test_every_config_is_a_lab_note_that_composes(path: Path) -> None:
    """Read each file once: check its text, the files that it names, and its commands."""
    check_note(path)
    check_named_files(path)
    for entry, overrides in uses(path):
        chosen = compose_config(entry, overrides)["model"]["name"]
        assert chosen == path.stem or path.parent.name != "model"


def check_note(path: Path) -> None:
    """Check that the note describes the file and gives a command that uses it, in lines of 120 characters at most."""
    assert len(re.findall(r"\w+", note(path))) > 8, "says nothing about itself"
    name = CALLED.get(path.stem, path.stem)
    assert any(name in command for command in COMMAND.findall(note(path))), "no command with it"
    assert max(len(line) for line in note(path).splitlines() if not line.startswith("#  ")) <= 120


def check_named_files(path: Path) -> None:
    """Check that every file that a comment names exists."""
    written = {"run_dir/constrained/report.json"}
    text = "\n".join(line.partition("#")[2] for line in path.read_text().splitlines())
    for word in set(re.findall(r"[\w.*]+/[\w./*]+\.(?:yaml|py|json)\b", text)) - written:
        assert any(list(base.glob(word)) for base in (ROOT, CONFIGS)) or "NAME" in word, word


def uses(path: Path) -> list[tuple[str, list[str]]]:
    """Return the training commands of the note, and one that chooses the file if none of them does."""
    group, name = path.parent.name, path.stem
    if group == "experiment":
        return []
    choice = f"{'+' if group == 'attention' else ''}{group}={name}"
    if group in NOT_CHOSEN or any(choice in overrides for _, overrides in training(path)):
        return training(path)
    return [*training(path), ("std_train", [choice, "+model=spec_vit_digits"])]


@pytest.mark.parametrize("entry", ["adv_train", "std_train"])
@pytest.mark.parametrize("name", one_of_each_shape())
def test_every_shape_of_recipe_composes_to_its_model(entry: str, name: str) -> None:
    config = compose_config(entry, [f"+model={name}", "data=digits"])
    assert config["model"]["name"] == name
    assert config["name"] == f"{name}-digits-s0"
    assert config["run_dir"] == f"runs/{name}-digits-s0"
    own = "lmce" if name.startswith("cert_") else "pgd_at"
    assert config["objective"]["name"] == {"adv_train": own, "std_train": "clean"}[entry]
    penalised = name.startswith("spec_") or "msvp" in name
    assert (config["penalty"]["lambda_q"] > 0) == penalised, "MSVP is on for spec_* and what names it"
    with torch.device("meta"):  # true sizes are built in tests/zoo/models
        zoo.create_model(**(config["model"] | tiny_options(name)))


@pytest.mark.parametrize("plus", ["", "+", "++"])
def test_options_of_a_model_need_no_plus_sign(plus: str) -> None:
    config = compose_config("adv_train", ["+model=l2_deit_ti", f"{plus}model.patch_size=4", f"{plus}model.depth=2"])
    assert config["model"] == {"name": "l2_deit_ti", "patch_size": 4, "depth": 2}


def test_certify_composes() -> None:
    assert compose_config("certify", ["data=digits", "eps=[0.1]"])["eps"] == [0.1]


def test_a_key_of_certify_is_written_once(tmp_path: Path) -> None:
    """A key in stage.yaml and in Settings is read by the trainer and by the stage alone."""
    configs = Path(shutil.copytree(CONFIGS, tmp_path / "configs"))
    with (configs / "certify" / "stage.yaml").open("a") as stage:
        stage.write("note: null\n")
    noted = make_dataclass("Noted", [("note", str | None, None)], bases=(Settings,), frozen=True)

    trained = compose_config("adv_train", ["+model=spec_vit_digits", "certify.note=x"], configs)["certify"]
    assert trained.pop("enabled")
    assert section_of(noted, trained, "certify").note == "x"
    alone = compose_config("certify", ["note=x"], configs)
    assert settings_of(noted, alone).note == "x"


# --- models without a file -------------------------------------------------------------------------------------------


def test_files_and_patterns_are_of_models_of_the_zoo() -> None:
    assert set(RECIPES) <= set(zoo.list_models())
    assert all(recipe(name)["model"]["name"] == name for name in zoo.list_models())
    assert {path.stem for path in files("attention")} == set(variants())
    patterns = list(table("model", CONFIGS))
    unwritten = set(zoo.list_models()) - set(RECIPES)
    first = {next((pattern for pattern in patterns if fnmatchcase(name, pattern)), None) for name in unwritten}
    assert first == {*patterns, None}


def test_the_penalty_of_a_prefix_is_a_group_like_any() -> None:
    assert not (CONFIGS / "model" / "spec_deit_b.yaml").exists()
    config = compose_config("adv_train", ["+model=spec_deit_b", "model.depth=2", "+attention=dp"])
    assert config["penalty"]["lambda_q"] == 1e-4
    assert config["model"] == {"name": "spec_deit_b", "depth": 2, "attention": {"name": "dp"}}
    assert compose_config("adv_train", ["+model=spec_deit_b", "penalty=none"])["penalty"]["lambda_q"] == 0


def test_an_experiment_takes_a_model_without_a_file() -> None:
    config = compose_config("adv_train", ["+experiment=specformer_cifar10_adv", "model=scsa_deit_ti"])
    assert (config["model"]["name"], config["model"]["patch_size"]) == ("scsa_deit_ti", 4)
    assert config["penalty"]["lambda_q"] == 0


def test_a_file_comes_before_the_name(tmp_path: Path) -> None:
    """A recipe wins over the plain name, also from a folder of the user's own."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "ln_vit_ti.yaml").write_text("# @package _global_\nmodel: {name: ln_vit_ti, depth: 3}\n")
    ours = compose_config("adv_train", ["+model=ln_vit_ti", f"hydra.searchpath=[file://{tmp_path}]"])
    assert ours["model"] == {"name": "ln_vit_ti", "depth": 3}
    assert compose_config("adv_train", ["+model=ln_vit_ti"])["model"] == {"name": "ln_vit_ti"}


# --- they say something ----------------------------------------------------------------------------------------------


def test_a_file_of_a_model_is_a_recipe_of_its_own() -> None:
    for name in RECIPES:
        assert recipe(name) not in (row("model", name, CONFIGS), {"model": {"name": name}}), name


def test_configs_travel_with_the_package() -> None:
    assert (CONFIGS / "adv_train.yaml").is_file()
    assert Path("configs").name == CONFIGS.name


# --- mistyped names --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("main", "overrides", "said"),
    [
        ("adv_train", ["+model="], "no model ''; nearest: "),
        ("adv_train", ["+experiment=mo_cifr10"], "no experiment 'mo_cifr10'; nearest: mo_cifar10, "),
        ("constrain", ["+experiment=certvit_deit"], "no experiment 'certvit_deit'; nearest: certvit_deit_b, "),
        ("adv_train", ["+model=dp_vit_b", "+attention=scs"], "no attention 'scs'; nearest: scsa, "),
        ("adv_train", ["+model=dp_vit_b", "data=cifr10"], "no data 'cifr10'; nearest: cifar10, cifar100, mnist (all: "),
        ("adv_train", ["+model=dp_vit_b", "optimizer=adam"], "no optimizer 'adam'; choose one of adamw, muon, sgd"),
        ("evaluate", ["handover=x", "protocol=robustbnch"], "no protocol 'robustbnch'; nearest: robustbench, "),
        ("adv_train", ["+model=dp_vit_b", "train.epoch=3"], "no config key 'train.epoch'; nearest: train.epochs, "),
        ("adv_train", ["+model=dp_vit_b", "lr=3"], "no config key 'lr'; nearest: optimizer.lr, "),
        ("adv_train", ["+model=dp_vit_b", "optimizr=sgd"], "no config key 'optimizr'; nearest: optimizer, "),
        ("adv_train", ["+model=dp_vit_b", "objective=mart", "objective.bta=6"], "nearest: objective.beta, "),
        ("adv_train", ["+model=dp_vit_b", "+trian.epochs=3"], "no config key 'trian'; nearest: train, "),
        ("adv_train", ["+modle=dp_vit_b"], "no config key 'modle'; nearest: model, "),
        ("adv_train", ["+model=dp_vit_b", "~trian"], "no config key 'trian'; nearest: "),
        ("certify", ["handovr=x"], "no config key 'handovr'; nearest: handover, "),
        ("certify", ["+model=dp_vit_b"], "no config key 'model'; nearest: "),
        ("adv_train", [], "no model given; add +model=NAME"),
        ("adv_train", ["model=dp_vit_b"], "write +model=NAME, with a plus sign"),
        ("adv_train", ["+model=dp_vit_b", "attention=l2"], "write +attention=NAME, with a plus sign"),
        ("adv_train", ["dp_vit_b"], "'dp_vit_b' sets nothing; write KEY=VALUE, such as +model=NAME"),
        ("adv_train", ["+model=dp_vit_b", "--help"], "--help is a flag, but options are KEY=VALUE; see configs/"),
        ("certify", ["-h"], "configs/certify.yaml"),
    ],
)  # fmt: skip
def test_a_wrong_name_is_answered_with_the_nearest(main: str, overrides: list[str], said: str) -> None:
    with pytest.raises(UserError) as refused:
        compose_config(main, overrides)
    assert said in str(refused.value)
    assert len(str(refused.value)) < 200
    listed = re.search(r"\(all: (\S+)\)", str(refused.value))
    assert listed is None or (ROOT / listed[1]).exists()


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["+model=spec_vit_bb"], "no model 'spec_vit_bb'; nearest: spec_vit_b, "),
        (["+model=scsa_deit_tt"], "no model 'scsa_deit_tt'; nearest: scsa_deit_ti, "),
        (["+model=[dp_vit_b,dp_vit_bb]"], "no model 'dp_vit_bb'; nearest: dp_vit_b, "),
        (["+experiment=mo_cifar10", "model=dp_deit_x"], "no model 'dp_deit_x'; nearest: dp_deit_b, "),
    ],
)
def test_a_wrong_model_is_answered_with_the_nearest(
    overrides: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any work, although no image is there yet."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as refused:
        prepare_first(compose_config("adv_train", overrides))
    assert said in str(refused.value)
