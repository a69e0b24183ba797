"""AutoAttack through our interface equals its authors' version image by image, is silent, and refuses in one line."""

from typing import Any

import pytest
import torch

from certizoo import UserError
from certizoo.attacks import make
from certizoo.attacks.auto import AutoAttack
from tests.tools.attacked import images_of, mlp, own_labels, survivors, vit


@pytest.mark.parametrize(
    ("make_model", "norm", "eps"),
    [
        (mlp, "linf", 0.06),
        (mlp, "l2", 0.35),
        (vit, "linf", 0.4),
        (vit, "l2", 1.5),
        pytest.param(mlp, "linf", 0.03, marks=pytest.mark.slow),  # one image reaches Square and its 5000 queries
        pytest.param(mlp, "l2", 0.2, marks=pytest.mark.slow),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_autoattack_is_the_authors_image_by_image(make_model: Any, norm: str, eps: float) -> None:
    """The seed and the batch are the same; ten classes let their version `standard` run as published."""
    from pyautoattack import AutoAttack as Authors

    model, images = make_model().eval(), images_of(4)
    labels = own_labels(model, images)
    labels[3] = (labels[3] + 1) % 10
    authors = Authors(model, norm={"linf": "Linf", "l2": "L2"}[norm], eps=eps, seed=5, version="standard")
    theirs, _ = authors.run_standard_evaluation(images, labels, batch_size=4)
    ours = AutoAttack(norm, eps, seed=5).run(model, images, labels)
    assert torch.equal(ours, theirs)
    assert survivors(model, ours, labels) != survivors(model, images, labels), "nothing was fooled at all"


def test_autoattack_of_few_classes() -> None:
    images = images_of(3)
    for classes, too_many, refused in (
        (3, ("apgd-ce", "apgd-t"), r"needs 4 classes or more, but the model has 3; set its attacks=\[apgd-ce\]"),
        (2, ("apgd-dlr",), r"apgd-dlr needs 3 classes or more, but the model has 2; set its attacks=\[apgd-ce,fab-t"),
    ):
        model = mlp(classes)
        with pytest.raises(UserError, match=refused):
            AutoAttack("linf", 0.1, too_many).run(model, images, own_labels(model, images))
    for classes, attacks in ((4, ("apgd-t", "fab-t")), (3, ("apgd-dlr",)), (2, ("apgd-ce", "fab-t"))):
        model = mlp(classes)
        labels = own_labels(model, images)
        found = AutoAttack("linf", 0.9, attacks).run(model, images, labels)
        assert not all(survivors(model, found, labels))


def test_autoattack_refuses_in_words() -> None:
    wrong: list[tuple[dict[str, object], str]] = [
        ({"norm": "l1"}, "norm='l1'"),
        ({"eps": 0}, "eps=0"),
        ({"attacks": ["pgd"]}, "choose some of apgd-ce, apgd-dlr"),
        ({"attacks": []}, "choose some of"),
    ]
    for options, message in wrong:
        with pytest.raises(UserError, match=message):
            make({"kind": "autoattack"} | options)
    small = torch.rand(2, 1, 4, 4)
    with pytest.raises(UserError, match="5 pixels a side"):
        AutoAttack("l2", 0.5, ("square",)).run(mlp(side=4), small, torch.zeros(2, dtype=torch.int64))


def test_autoattack_is_quiet_and_leaves_no_file(tmp_path: Any, monkeypatch: Any, capfd: Any) -> None:
    monkeypatch.chdir(tmp_path)
    model, images = mlp(), images_of(2)
    AutoAttack("linf", 0.1, ("apgd-ce", "apgd-t")).run(model, images, own_labels(model, images))
    assert not list(tmp_path.iterdir())
    assert capfd.readouterr() == ("", "")
