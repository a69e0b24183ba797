"""The data that a foreign hand-over names: a folder of this machine, or the data that the user gives."""

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import zoo
from certify.__main__ import main
from certify.rows.arguments import data_of
from certizoo import UserError, shards
from certizoo.config.compose import compose_config
from certizoo.shards.writing import sources
from tests.tools.cases import mostly_slow

MODEL: dict[str, Any] = {"name": "spec_vit_digits", "depth": 1, "embed_dim": 8}


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("digits")
    for split, source in sources.digits().items():
        shards.write(source[:20], root, name="digits", split=split)
    return root


@pytest.fixture
def handover(tmp_path: Path, digits: Path) -> Path:
    data = compose_config("certify", ["data=digits", f"data.root={digits}"])["data"]
    zoo.handover.save(tmp_path / "handover", zoo.create_model(**MODEL), MODEL, {"data": data})
    return tmp_path / "handover"


def naming(handover: Path, said: Any) -> Path:
    path = handover / "config.yaml"
    config = yaml.safe_load(path.read_text())
    config["data"] = {**config["data"], **said} if isinstance(said, dict) else said
    path.write_text(yaml.safe_dump(config))
    return handover


def config(*words: str) -> dict[str, Any]:
    return compose_config("certify", words)


PLACES = [
    "pipe:sh -c 'touch {mark}' {{shard}}", "pipe:{mark}", "http://127.0.0.1:9/set", "https://host/set", "s3://bucket/set",
    "gs://bucket", "file:///tmp", "simplecache::s3://bucket", "ftp://host", "ssh://host/x", "github://a:b@/", "PIPE:sh {{shard}}://",
]  # fmt: skip


@pytest.mark.hostile
@pytest.mark.parametrize("place", PLACES)
def test_a_place_that_only_the_config_names_is_not_opened(
    place: str, handover: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """This also holds where the user allows the program for their own data."""
    monkeypatch.setenv("CERTIZOO_PIPES", "sh")
    naming(handover, {"root": place.format(mark=tmp_path / "mark")})
    with pytest.raises(SystemExit) as caught:
        main([f"handover={handover}", "images=2", f"out={tmp_path / 'out'}"])
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "data.root" in line
    assert not (tmp_path / "mark").exists()
    assert not (tmp_path / "out").exists()


@pytest.mark.hostile
@pytest.mark.parametrize("place", PLACES[:2])
def test_only_commands_of_the_command_line_run(place: str, handover: Path) -> None:
    with pytest.raises(UserError, match=r"data\.root"):
        data_of(config("trust_data=true"), naming(handover, {"root": place}))


def test_a_place_elsewhere_is_used_where_the_person_says_so(handover: Path) -> None:
    naming(handover, {"root": "s3://bucket/set", "cache": "/somewhere"})
    found = data_of(config("trust_data=true"), handover)
    assert (found.root, found.cache) == ("s3://bucket/set", "/somewhere")
    own = data_of(config("data=digits", 'data.root="pipe:cat {shard}"'), handover)
    assert own.root == "pipe:cat {shard}"


def test_a_folder_alone_is_one_of_the_training_data(handover: Path) -> None:
    naming(handover, {"root": "s3://bucket/set", "cache": "/somewhere", "test": "few-*.tar"})
    found = data_of(config("data.root=here"), handover)
    assert (found.root, found.test, found.cache) == ("here", "few-*.tar", None)
    whole = data_of(config("data=digits", "data.root=here"), handover)
    assert (whole.root, whole.test) == ("here", "digits-test-*.tar")


@pytest.mark.hostile
@pytest.mark.parametrize("cache", ["/root/.ssh", "~", ".", "../../x"])
def test_nothing_is_written_where_a_config_says(cache: str, handover: Path, digits: Path) -> None:
    found = data_of(config(), naming(handover, {"cache": cache}))
    assert found.cache is None
    assert found.root == str(digits)


WRONG: list[Any] = [
    None, 5, "digits", [], [1], {"root": None}, {"root": 5}, {"root": ["a"]}, {"root": ""}, {"root": "a\0b"},
    {"root": "a\nb"},    {"root": "\x1b[2J"}, {"root": "~nobody-of-this-name/x"},
    {"name": "../../etc/passwd"}, {"name": "x; touch mark"},
    {"name": ""}, {"name": 5}, {"test": "../*"}, {"test": "**"}, {"test": 5}, {"test": ""}, {"test": "/etc/*"},
    {"num_classes": 10**12}, {"num_classes": True}, {"num_classes": 10.5}, {"img_size": 10**6},
    {"img_size": -1}, {"img_size": float("nan")}, {"channels": True}, {"channels": [3]}, {"workers": 10**5},
    {"workers": -1}, {"timeout": 10**12}, {"cache_gb": float("inf")}, {"cache_gb": "one"},
    {"cache": 5}, {"verify": ["size"]},
    {"verify": "no"}, {"augment": {}}, {"extra": 1}, {5: 1},
]  # fmt: skip


@pytest.mark.hostile
@pytest.mark.parametrize("said", mostly_slow(WRONG, *list(WRONG)[::4]), ids=str)
def test_values_that_no_data_have_are_one_line(said: Any, handover: Path) -> None:
    naming(handover, copy.deepcopy(said))
    with pytest.raises(UserError) as caught:
        shards.find(data_of(config(), handover), "test")
    assert len(str(caught.value)) < 500


@pytest.mark.hostile
@pytest.mark.parametrize("kind", ["fifo", "folder", "device", "dangling link"])
def test_what_is_no_file_is_no_shard(kind: str, handover: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    path = root / "digits-test-000000.tar"
    {
        "fifo": lambda: os.mkfifo(path),
        "folder": path.mkdir,
        "device": lambda: path.symlink_to("/dev/zero"),
        "dangling link": lambda: path.symlink_to("nowhere"),
    }[kind]()
    with pytest.raises(UserError, match="digits-test-000000"):
        shards.find(data_of(config(), naming(handover, {"root": str(root)})), "test")


def test_the_folder_of_the_training_is_read(handover: Path) -> None:
    found = data_of(config(), handover)
    assert shards.find(found, "test").samples == 20
    assert torch.is_tensor(next(iter(shards.eval_loader(shards.find(found, "test"), found, batch_size=2)))[1])
