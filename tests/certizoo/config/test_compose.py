"""Words of a command line are taken for what people mean by them, and faults are one line."""

import pytest

from certizoo import UserError
from certizoo.config.compose import compose_config


@pytest.mark.parametrize("text", ["2026_11_30", "1e5", "840000", "true", "a,b", "~/runs", "a=b"])
def test_a_name_keeps_its_letters(text: str) -> None:
    assert compose_config("certify", [f"out={text}"])["out"] == text
    assert compose_config("adv_train", ["+model=spec_vit_digits", f"name={text}"])["run_dir"] == f"runs/{text}"


def test_other_values_are_read_as_before() -> None:
    found = compose_config("certify", ["out=null", "eps=[0.1,1e-2]", "batch_size=1_0"])
    assert (found["out"], found["eps"], found["batch_size"]) == (None, [0.1, 0.01], 10)


@pytest.mark.parametrize(
    ("word", "words"),
    [
        ("attack=null", "attack=null names no file; write attack=NAME"),
        ("=3", "=3 sets nothing; write KEY=VALUE"),
    ],
)
def test_a_group_takes_a_name(word: str, words: str) -> None:
    with pytest.raises(UserError, match=f"^{words}"):
        compose_config("certify", [word])


def test_the_group_that_has_no_name_is_named() -> None:
    with pytest.raises(UserError, match=r"^attack=null names no file"):
        compose_config("adv_train", ["+model=spec_vit_digits", "data=digits", "attack=null"])
