"""A certificate reaches the registry and comes back, despite tampering: other weights, texts that are markup."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import mlflow
import pytest
import torch

import zoo
from certify.__main__ import main
from certify.evaluation import tables as evaluation_tables
from certify.stage import register, report, tables
from certify.stage import run as stage
from certify.stage.model_card import model_card
from certizoo import UserError
from certizoo.attacks import AttackConfig
from certizoo.registry import browse
from certizoo.registry.versions import champion
from certizoo.shards import DataConfig

CONFIG: dict[str, Any] = {"name": "spec_vit_digits", "num_classes": 10, "img_size": 8, "in_chans": 1}
SETTINGS = stage.Settings(
    method="lofast", images=20, eps=(0.1,), batch_size=20, attack=AttackConfig(norm="l2", steps=2, loss="margin")
)


@pytest.fixture(scope="module")
def made(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Return a folder with handover/ and certificate/, and the summary."""
    folder = tmp_path_factory.mktemp("made")
    torch.manual_seed(0)
    data = DataConfig("digits", str(digits), "digits-train-*.tar", "digits-test-*.tar", 10, 8, 1)
    zoo.handover.save(folder / "handover", zoo.create_model(**CONFIG), CONFIG, {"data": vars(data)})
    return folder, stage.run(folder / "handover", data, SETTINGS, folder / "certificate")


@pytest.fixture
def published(made: tuple[Path, dict[str, Any]], store_in: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store_in)
    folder, _ = made
    line = register.publish(
        folder / "handover", folder / "certificate", registered_name="digits", experiment="test",
        champion_images=20, tags={"team": "https://me:hunter2@host"},
    )  # fmt: skip
    assert line == "digits version 1 (champion)"
    return store_in


def other_weights(path: Path) -> None:
    torch.manual_seed(1)
    zoo.handover.save(path.parent / "tmp", zoo.create_model(**CONFIG), CONFIG, {})
    path.unlink()
    (path.parent / "tmp" / "model.safetensors").rename(path)
    (path.parent / "tmp" / "config.yaml").unlink()
    (path.parent / "tmp").rmdir()


def test_the_tags_say_of_what_the_certificate_is(published: str, made: tuple[Path, dict[str, Any]]) -> None:
    (version,) = browse.versions("digits")
    for key in ("weights_sha256", "data_digest", "image_list_sha256", "method", "dataset"):
        assert version.tags[key] == made[1][key]
    share = made[1]["accuracy"]["0.1"]["certified"]
    assert 0 <= float(version.tags["certified_low.0.1"]) <= share
    assert version.tags["torch"] == torch.__version__
    assert version.tags["norm"] == "l2"
    assert version.tags["team"] == "https://host"
    assert {"files_sha256", "code_sha256", "certificate_sha256"} <= set(version.tags)


@pytest.mark.hostile
def test_swapped_weights_in_the_cache_are_not_evaluated(
    published: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise their figures would be published for another version."""
    other_weights(browse.download("digits@champion") / "model.safetensors")
    before = browse.find("digits/1").tags
    with pytest.raises(SystemExit):
        main(["evaluate", "version=digits@champion", f"out={tmp_path / 'e'}", "images=20", "check_images=0"])
    assert "is not what was published as models:/digits/1" in capsys.readouterr().err
    assert browse.find("digits/1").tags == before


@pytest.mark.hostile
def test_swapped_weights_in_the_store_are_not_served(published: str, tmp_path: Path) -> None:
    mlflow.set_tracking_uri(published)
    mlflow.set_registry_uri(published)
    served = mlflow.pyfunc.load_model("models:/digits@champion")
    images = torch.rand(2, 1, 8, 8).numpy()
    assert served.predict(images).shape == (2, 10)
    with pytest.raises(UserError, match=r"images must lie in \[0,1\]"):
        served.predict(255 * images)
    (weights,) = (tmp_path / "mlartifacts").rglob("model.safetensors")
    other_weights(weights)
    with pytest.raises(UserError, match="not what was published"):
        mlflow.pyfunc.load_model("models:/digits@champion")


@pytest.mark.hostile
@pytest.mark.parametrize("tag", ["clean_acc", "certified_acc.0.1", "weights_sha256"])
def test_a_fact_of_a_configuration_is_refused_before_anything_is_sent(
    made: tuple[Path, dict[str, Any]], store_in: str, tag: str
) -> None:
    folder, _ = made
    with pytest.raises(UserError, match="is reserved"):
        register.publish(
            folder / "handover", folder / "certificate", registered_name="digits", experiment="test",
            tags={tag: "1.0"}, uri=store_in,
        )  # fmt: skip
    assert browse.versions(uri=store_in) == []


@pytest.mark.hostile
def test_a_hand_over_with_a_link_to_a_private_file_is_not_published(
    made: tuple[Path, dict[str, Any]], store_in: str, tmp_path: Path
) -> None:
    folder, _ = made
    (tmp_path / "id_rsa").write_text("KEY")
    link = folder / "handover" / "notes.txt"
    link.symlink_to(tmp_path / "id_rsa")
    try:
        with pytest.raises(UserError, match="link to outside"):
            register.publish(
                folder / "handover", folder / "certificate", registered_name="digits", experiment="e",
                uri=store_in,
            )  # fmt: skip
    finally:
        link.unlink()


MARKUP = {
    "HTML": "<img src=x onerror=alert(1)>",
    "a script": "</bdi></td><script>alert(1)</script>",
    "a link": "[click](http://evil.example)",
    "a picture": "![](http://evil.example/pixel.png)",
    "cells": "a | 99.9 | 99.9 |",
    "a heading": "x\n\n# 99.9 % certified",
    "code": "`</code><b>x</b>`",
    "an escape": "\x1b[2J",
}


def planted(summary: dict[str, Any], text: str) -> dict[str, Any]:
    """Put the text wherever the summary shows a foreign config, name or key."""
    optimizer = {"name": text, "lr": text}
    training = {"objective": {"name": text}, "optimizer": optimizer, "attack": {"eps": text}, "seed": text}
    own = {"model": {"name": text, "img_size": text}, "dataset": text, "attention": text, "git_commit": text}
    breakdown = (summary["breakdown"] or {"quantity": "growth", "eps": 0.1}) | {"steps": {text: 2.0}}
    return summary | own | {"training": training, "certizoo": text, "breakdown": breakdown}


@pytest.mark.hostile
@pytest.mark.parametrize("case", MARKUP)
def test_a_card_shows_markup_as_text(made: tuple[Path, dict[str, Any]], case: str) -> None:
    text = MARKUP[case]
    card = model_card(planted(made[1], text))
    honest = model_card(planted(made[1], "x"))
    assert "<" not in card.replace("FOLDER", "")
    assert "\x1b" not in card
    assert not re.search(r"(?<!\\)\]\(", card)
    assert len(card.splitlines()) == len(honest.splitlines()), "no line of its own"
    rows = [line.count("|") - line.count("\\|") for line in card.splitlines()]
    assert rows == [line.count("|") - line.count("\\|") for line in honest.splitlines()], "no cell of its own"


@pytest.mark.hostile
@pytest.mark.parametrize("case", ["HTML", "a script", "an escape"])
def test_the_report_shows_markup_as_text(made: tuple[Path, dict[str, Any]], case: str) -> None:
    import pandas as pd

    folder, summary = made
    rows = pd.read_parquet(folder / "certificate" / stage.TABLE)
    rows["key"] = MARKUP[case]
    pictures = dict.fromkeys(range(len(rows)), "data:image/png;base64,")
    around = report.Circumstances(MARKUP[case], MARKUP[case], [MARKUP[case]] * 10)
    page = report.report(
        planted(summary, MARKUP[case]) | {"model": CONFIG | {"name": MARKUP[case]}}, rows, pictures, around
    )
    tags: list[tuple[str, dict[str, str | None]]] = []
    reader = HTMLParser()
    reader.handle_starttag = lambda tag, attrs: tags.append((tag, dict(attrs)))  # type: ignore[method-assign]
    reader.feed(page)
    assert ("img", {"src": "data:image/png;base64,"}) in [(tag, {"src": of.get("src")}) for tag, of in tags]
    assert "script" not in {tag for tag, _ in tags}
    assert not [of for _, of in tags if "onerror" in of or of.get("src") == "x"]


@pytest.mark.hostile
def test_tables_of_the_terminal_take_no_markup(made: tuple[Path, dict[str, Any]]) -> None:
    from io import StringIO

    from rich.console import Console

    out = StringIO()
    summary = planted(made[1], "[/val]\x1b[2J")
    Console(file=out, width=200).print(tables.table(summary))
    evaluated = {"accuracy": {}, "worst_case": [], "protocol": "[/x]"}
    Console(file=out, width=200).print(evaluation_tables.table(summary | evaluated))
    assert "[/val]" in out.getvalue()
    assert "\x1b" not in out.getvalue()


def test_champions_of_few_images_are_wanted_by_name_only(made: tuple[Path, dict[str, Any]], store_in: str) -> None:
    folder, _ = made
    line = register.publish(
        folder / "handover", folder / "certificate", registered_name="digits", experiment="test",
        uri=store_in,
    )  # fmt: skip
    assert "not champion: its 20 images are fewer than champion_images=300" in line
    with pytest.raises(UserError, match="champion_images=0"):
        champion.refuse_given(0)
    assert replace(SETTINGS, images=30).images == 30
    assert json.loads((folder / "certificate" / "certificate.json").read_text())["images"] == 20
