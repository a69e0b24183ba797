"""The error for an unknown name lists the three nearest names, never all of them."""

import pytest

import zoo
from certizoo import UserError
from certizoo.nearest import choices, nearest, unknown
from tests.tools.cases import mostly_slow

KEYS = ["optimizer.lr", "optimizer.name", "train.epochs", "train.log_every", "name", "data.train"]


def test_names_are_quoted_once_and_other_values_described() -> None:
    assert str(unknown("norm", "l3", ["l2", "linf"])) == "no norm 'l3'; choose one of l2, linf"
    assert str(unknown("norm", 2, ["l2", "linf"])) == "no norm 2; choose one of l2, linf"


@pytest.mark.parametrize(
    ("wrong", "known", "first"),
    [
        ("spec_vit_bb", zoo.list_models(), "spec_vit_b"),
        ("SPEC-VIT-B", zoo.list_models(), "spec_vit_b"),
        ("train.epoch", KEYS, "train.epochs"),
        ("trian.epochs", KEYS, "train.epochs"),
        ("lr", KEYS, "optimizer.lr"),
        ("certvit", ["cert_vit_c10", "cert_vit_c100", "cert_vit_mnist", "l2_certvit_c10"], "l2_certvit_c10"),
        ("", KEYS, "data.train"),
    ],
)
def test_the_nearest_is_first_of_three(wrong: str, known: list[str], first: str) -> None:
    found = nearest(wrong, known)
    assert found[0] == first
    assert len(found) == len(set(found)) == 3


@pytest.mark.parametrize("name", mostly_slow(zoo.list_models(), *list(zoo.list_models())[::5]))
def test_a_letter_too_many_or_too_few_is_understood(name: str) -> None:
    for wrong in (f"{name}x", name[:3] + name[4:], name[:-1] + "_" + name[-1]):
        if wrong not in zoo.list_models():
            assert name in nearest(wrong, zoo.list_models()), wrong


def test_where_all_names_are() -> None:
    many = [f"name{i}" for i in range(40)]
    assert choices("name7", many, "a folder").endswith("(all: a folder)")
    assert "all:" not in choices("name7", many)
    assert choices("b", ["a", "b1", "c", "d"]) == "nearest: b1, a, c (all: a, b1, c, d)"
    assert choices("b", {"x": 1, "y": 2}) == "choose one of x, y"
    assert choices("b", []) == "there is none"


def test_the_error_is_one_line() -> None:
    assert str(unknown("model", "dp_vit_tii", zoo.list_models(), "python -m zoo")) == (
        "no model 'dp_vit_tii'; nearest: dp_vit_ti, dp_vit_t1, dp_vit_t2 (all: python -m zoo)"
    )
    with pytest.raises(UserError, match=r"no model 'dp_vit_tii'; nearest: dp_vit_ti, .* \(all: python -m zoo\)"):
        zoo.create_model("dp_vit_tii")
