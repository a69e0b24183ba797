"""The stage and the evaluation of sentences: rows in the list's order, words covered by a radius, a readable report."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import zoo
from certify import certified_radius
from certify.evaluation import run as evaluation
from certify.photos.predict import Asked, Predictor
from certify.rows.arguments import data_of
from certify.stage import run as stage
from certify.stage import tables
from certify.stage.substitutions import COLUMN, counter, nearest
from certizoo import UserError
from certizoo.attacks import AttackConfig
from certizoo.shards import DataConfig
from certizoo.shards.__main__ import main as shards
from certizoo.shards.format import tokens
from zoo.models.overview import tiny_options

NAME = "lofast_text_l3_h4"
WORDS = ["a", "b", "c", "d", "e", "f", "g", "h"]
LENGTHS = (1, 7, 2, 3, 3, 12, 1, 15, 2, 7)  # the model takes 12 words
SETTINGS = stage.Settings(
    method="lofast", eps=(0.01, 5.0), headline_eps=0.01, batch_size=4, attack=AttackConfig("l2", 0.1, 5, loss="margin")
)
PGD = {"pgd": {"kind": "pgd", "norm": "l2", "eps": 0.01, "steps": 3, "loss": "margin"}}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return shards of sentences whose label is whether they begin with a."""
    root = tmp_path_factory.mktemp("text")
    sentences = [" ".join(WORDS[(start + place * 3) % 8] for place in range(n)) for start, n in enumerate(LENGTHS)]
    lines = [f"{sentence}\t{int(sentence[0] == 'a')}" for sentence in sentences]
    (root / "some.tsv").write_text("\n".join(["sentence\tlabel", *lines, *lines]))
    for split in ("train", "test"):
        shards(["text", str(root / "some.tsv"), str(root / "shards"), "--name", "toy", "--split", split])
    return root / "shards"


def data(root: Path) -> DataConfig:
    return DataConfig("toy", str(root), "toy-train-*.tar", "toy-test-*.tar", 2, 12, kind="text")


@pytest.fixture(scope="module")
def handover(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "handover"
    words = tokens.load(data(root).tokens).words
    config: dict[str, Any] = {"name": NAME, **tiny_options(NAME), "num_classes": 2, "vocabulary": len(words)}
    torch.manual_seed(0)
    model: Any = zoo.create_model(**config)
    with torch.no_grad():  # answer by the words alone, with some margin
        model.head.weight.copy_(torch.randn_like(model.head.weight) * 5)
    zoo.handover.save(folder, model, config, {"data": vars(data(root))})
    (folder / zoo.handover.TOKENIZER).write_text(data(root).tokens.read_text())
    return folder


def test_rows_are_those_of_the_list_whatever_the_batches(handover: Path, root: Path, tmp_path: Path) -> None:
    summary = stage.run(handover, data(root), SETTINGS, tmp_path / "a")
    stage.run(handover, data(root), replace(SETTINGS, batch_size=20), tmp_path / "b")
    one, other = (pd.read_parquet(tmp_path / name / stage.TABLE) for name in "ab")
    assert one["key"].tolist() == other["key"].tolist() == sorted(one["key"])
    assert len(one) == 2 * len(LENGTHS)
    for column in ("radius.lofast", "margin", COLUMN):
        torch.testing.assert_close(torch.tensor(one[column]), torch.tensor(other[column]), rtol=1e-3, atol=1e-6)
    assert one["radius.lofast"].max() > 0
    assert "words themselves do not change" in summary["threat_model"]["space"]
    assert "<blockquote>" in (tmp_path / "a" / stage.REPORT).read_text()
    assert summary[COLUMN] == one[COLUMN].mean()
    assert tables.table(summary).title.plain == f"{NAME} on {len(one)} sentences of toy, in %"  # type: ignore[union-attr]


def test_every_word_that_a_radius_covers_keeps_the_class(handover: Path) -> None:
    """Replace every word by every other one: those within the radius are counted, and none changes the class."""
    model: Any = zoo.handover.load(handover)[0]
    count, numbers = counter(model), [2, 5, 3]
    assert count is not None
    x_BCNT = model.patch_embed.embed(torch.tensor([numbers]))
    label_B = model(x_BCNT).argmax(1)
    radius = float(certified_radius(model, x_BCNT, label_B, "adjoint"))
    own_nV = nearest(model.patch_embed.words.sigmoid().double(), numbers)
    wide = float(own_nV.max()) * 1.001
    covered = 0
    for place in range(len(numbers)):
        for word in set(range(2, len(model.patch_embed.words))) - {numbers[place]}:
            swapped = model.patch_embed.embed(torch.tensor([[*numbers[:place], word, *numbers[place + 1 :]]]))
            if float((swapped - x_BCNT).double().norm()) <= radius:
                covered += 1
                assert model(swapped).argmax(1) == label_B
    assert count(numbers, radius) == pytest.approx(covered / own_nV.numel())
    assert count(numbers, wide) == 1
    assert count(numbers, 0.0) == count([1, 1], wide) == 0
    assert 0 < count(numbers, float(own_nV.median())) < 1


def test_an_evaluation_attacks_the_same_sentences(handover: Path, root: Path, tmp_path: Path) -> None:
    settings = evaluation.Settings("test", PGD, method="lofast", images=15, block=5, batch_size=2, check_images=2)
    summary = evaluation.run(handover, data(root), settings, tmp_path)
    table = pd.read_parquet(tmp_path / evaluation.TABLE)
    assert table["key"].tolist() == sorted(table["key"])
    assert summary["accuracy"]["pgd"] is not None
    assert (table["survives.pgd"] <= table["correct"]).all()


def test_a_certificate_is_of_the_words_of_the_handover(handover: Path, root: Path, tmp_path: Path) -> None:
    given = {"data": vars(data(root)) | {"tokenizer": None}, "trust_data": False}
    assert data_of(given, handover).tokens == handover / zoo.handover.TOKENIZER
    images = vars(data(root)) | {"kind": "images", "channels": 1}
    with pytest.raises(UserError, match=rf"data\.kind is images, but {NAME} takes text"):
        data_of({"data": images}, handover)


def test_photographs_are_refused(handover: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is a model of sentences, not of photographs"):
        Predictor(handover, Asked(), tmp_path)
