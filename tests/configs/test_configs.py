"""Every file under configs/ composes, and every model of the registry has a recipe and the reverse."""

from pathlib import Path

import pytest
import torch
import yaml

import zoo
from certizoo.compose import CONFIGS, compose_config
from zoo.attention import variants
from zoo.models.overview import tiny_options

MAIN = ("adv_train", "std_train")
ELSEWHERE = ("space", "protocol")  # test_tune.py, test_protocols.py
GROUPS = sorted(path.name for path in CONFIGS.iterdir() if path.is_dir() and path.name not in ELSEWHERE)
FILES = [(path.parent.name, path.stem) for group in GROUPS for path in sorted((CONFIGS / group).glob("*.yaml"))]


def shape(name: str) -> tuple[str, ...]:
    """What of a recipe can meet another main file badly: the groups it overrides and the keys it sets."""
    recipe = yaml.safe_load((CONFIGS / "model" / f"{name}.yaml").read_text())
    keys = sorted(f"{key}.{inner}" for key, value in recipe.items() if isinstance(value, dict) for inner in value)
    return (*map(str, recipe.get("defaults", ())), *(key for key in keys if not key.startswith("model.")))


def one_of_each_shape() -> list[tuple[str, str]]:
    return [("model", name) for name in {shape(name): name for group, name in FILES if group == "model"}.values()]


@pytest.mark.parametrize(
    ("group", "name"),
    [*one_of_each_shape(), *((group, name) for group, name in FILES if group not in ("experiment", "model"))],
    ids=lambda value: value,
)
def test_every_group_file_composes(group: str, name: str) -> None:
    """Recipes with std_train, since they meet adv_train below; experiments are in tests/configs/test_experiments.py."""
    plus = "+" if group in ("model", "attention") else ""
    overrides = [f"{plus}{group}={name}"] + ([] if group == "model" else ["+model=spec_vit_digits"])
    for main in MAIN[group == "model" :]:
        config = compose_config(main, overrides)
        assert config["name"].startswith(config["model"]["name"])


@pytest.mark.parametrize("name", [name for group, name in FILES if group == "model"])
def test_every_recipe_creates_its_model(name: str) -> None:
    config = compose_config("adv_train", [f"+model={name}"])
    assert config["model"]["name"] == name
    assert (config["penalty"]["lambda_q"] > 0) == name.startswith("spec_"), "spec_* is what MSVP is on for"
    with torch.device("meta"):  # its true size is built elsewhere
        zoo.create_model(**(config["model"] | tiny_options(name)))


def test_models_and_recipes_are_the_same_set() -> None:
    assert {name for group, name in FILES if group == "model"} == set(zoo.list_models())
    assert {name for group, name in FILES if group == "attention"} == set(variants())


@pytest.mark.parametrize("plus", ["", "+", "++"])
def test_options_of_a_model_need_no_plus_sign(plus: str) -> None:
    config = compose_config("adv_train", ["+model=l2_deit_ti", f"{plus}model.patch_size=4", f"{plus}model.depth=2"])
    assert config["model"] == {"name": "l2_deit_ti", "patch_size": 4, "depth": 2}


def test_certify_composes() -> None:
    assert compose_config("certify", ["data=digits", "eps=[0.1]"])["eps"] == [0.1]


def test_every_config_is_a_lab_note() -> None:
    for path in CONFIGS.rglob("*.yaml"):
        comments = [line for line in path.read_text().splitlines() if line.lstrip().startswith("#")]
        assert len([line for line in comments if "@package" not in line]) >= 1, f"{path} says nothing about itself"


def test_configs_travel_with_the_package() -> None:
    assert (CONFIGS / "adv_train.yaml").is_file()
    assert Path("configs").name == CONFIGS.name
