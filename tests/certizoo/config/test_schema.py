"""Sections of configurations: a value has the type and range of its annotation, or the error is one line."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from certizoo import UserError
from certizoo.attacks import KINDS, make
from certizoo.config.compose import CONFIGS, compose_config, defaults_of
from certizoo.config.schema import Ge, Le, OneOf, Section, section_of, typed_values, words, words_of
from certizoo.text import shown
from tests.tools.config_sections import SECTIONS
from tuning import spaces

T = TypeVar("T")

MODELS = {"adv_train": "spec_vit_digits", "std_train": "spec_vit_digits", "constrain": "l2_certvit_mnist"}

ODD = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(10**30, 10**40), st.floats(), st.text(max_size=20),
    st.sampled_from(["x" * 5000, 10**5000, "on", "off", "yes", "1e-3", "8/255"]),
    st.lists(st.one_of(st.integers(), st.text(max_size=3), st.floats()), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)  # fmt: skip


@dataclass(frozen=True)
class Inner(Section):
    share: Annotated[float, Ge(0), Le(1)] = 0.5


@dataclass(frozen=True)
class Outer(Section):
    count: Annotated[int, Ge(1)]
    name: Annotated[str, OneOf("a", "b")] = "a"
    pair: tuple[float, float] = (0.0, 1.0)
    enabled: bool = True
    inner: Inner = Inner()
    maybe: Inner | None = None


def test_values_get_their_own_types() -> None:
    said = {"count": "3", "pair": ["1e-3", 2], "enabled": "off", "inner": {"share": 1}, "maybe": {"share": 0}}
    assert section_of(Outer, said) == Outer(3, pair=(0.001, 2.0), enabled=False, inner=Inner(1.0), maybe=Inner(0.0))
    assert typed_values(Outer, said) == {
        "count": 3, "pair": [0.001, 2.0], "enabled": False, "inner": {"share": 1.0}, "maybe": {"share": 0.0},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({}, "top.count is missing; give a whole number of at least 1"),
        ({"count": 0}, "top.count=0 is invalid; give a whole number of at least 1"),
        ({"count": True}, "top.count=True is invalid"),
        ({"count": 2.5}, "top.count=2.5 is invalid"),
        ({"count": 10**5000}, "top.count=(a value of type int) is invalid; give"),
        ({"count": 1, "name": "c"}, "top.name='c' is invalid; give one of a, b"),
        ({"count": 1, "pair": [1]}, "top.pair=[1] is invalid; give 2 numbers, as [A,B]"),
        ({"count": 1, "pair": [1, float("nan")]}, "top.pair="),
        ({"count": 1, "pair": [1, True]}, "top.pair="),
        ({"count": 1, "enabled": "maybe"}, "top.enabled='maybe' is invalid; give true or false"),
        ({"count": 1, "inner": 5}, "top.inner=5 is a section of the configuration; set its keys, such as top.inner.s"),
        ({"count": 1, "inner": {"share": 2}}, "top.inner.share=2 is invalid; give a number of at least 0 and"),
        ({"count": 1, "maybe": {"share": 2}}, "top.maybe.share=2"),
        ({"count": 1, "inner": {"shares": 2}}, "no config key 'top.inner.shares'"),
        ("abc", "top='abc' is a section"),
    ],
    ids=shown,
)  # fmt: skip
def test_a_wrong_value_is_one_line_with_its_key(said: Any, message: str) -> None:
    with pytest.raises(UserError) as error:
        section_of(Outer, said, "top")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def keys_of(config: dict[str, Any], prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    return [
        key for name, value in config.items() for key in
        ([(*prefix, name)] + (keys_of(value, (*prefix, name)) if isinstance(value, dict) else []))
    ]  # fmt: skip


def with_value(config: dict[str, Any], key: tuple[str, ...], value: object) -> dict[str, Any]:
    first, *rest = key
    return config | {first: with_value(config[first], tuple(rest), value) if rest else value}


def refused_or(work: Callable[[], T]) -> T | None:
    """Return the result, or None after a UserError of one short line; other errors pass."""
    try:
        return work()
    except UserError as error:
        message = str(error)
    assert "\n" not in message
    assert len(message) < 1000
    return None


@cache
def composed(name: str) -> dict[str, Any]:
    return compose_config(name, [f"+model={MODELS[name]}", "data=digits"] if name in MODELS else [])


PLACES = st.deferred(lambda: st.sampled_from([(name, key) for name in SECTIONS for key in keys_of(composed(name))]))


@given(PLACES, ODD)
@settings(max_examples=1000, deadline=None)
def test_any_value_of_any_key_is_accepted_or_one_line(place: tuple[str, tuple[str, ...]], value: object) -> None:
    """Types stay what the schema says, whatever is written; nothing but a UserError leaves it."""
    name, key = place
    typed = refused_or(lambda: typed_values(SECTIONS[name], with_value(composed(name), key, value)))
    if typed is not None:
        assert typed_values(SECTIONS[name], typed) == typed, "checking twice changes nothing"


@pytest.mark.parametrize("name", SECTIONS)
def test_every_key_of_every_command_has_a_type(name: str) -> None:
    """A key that is added to a file is added to its section, or the command does not start."""
    typed_values(SECTIONS[name], composed(name))
    typed = words_of(SECTIONS[name])
    for key in defaults_of(name):
        assert any(key == known or key.startswith(f"{known}.") for known in typed), key
    assert all(typed.values())


@given(st.sampled_from(sorted(KINDS)), st.dictionaries(st.sampled_from(["eps", "norm", "steps", "name", "x"]), ODD))
@settings(max_examples=300, deadline=None)
def test_any_options_of_an_attack_are_accepted_or_one_line(kind: str, options: dict[str, object]) -> None:
    refused_or(lambda: make({"kind": kind} | options))


@given(st.sampled_from(spaces.names()), st.sampled_from(["parameters", "overrides", "without_model", "trainer"]), ODD)
@settings(max_examples=300, deadline=None)
def test_any_content_of_a_space_is_accepted_or_one_line(name: str, key: str, value: object) -> None:
    content = spaces.read(name, CONFIGS)
    parameters = content["parameters"]
    first = next(iter(parameters))
    for wrong in (
        {key: value},
        {"parameters": parameters | {first: value}},
        {"parameters": {"a.b": {"uniform": value}}},
    ):
        refused_or(lambda wrong=wrong: spaces.of(name, content | wrong, "space.yaml"))  # type: ignore[misc]


def test_words_describe_annotations() -> None:
    assert words(int | None) == "a whole number, or null"
    assert words(tuple[float, ...]) == "a list of numbers"
    assert words(Annotated[str, OneOf("auto")] | bool) == "auto, or true or false"
    assert words(dict[str, str]) == "a mapping {KEY: VALUE}"


@pytest.mark.parametrize(
    ("key", "value"),
    [("registry.experiment", "x" * 300), ("registry.experiment", " "), ("registry.model_name", "a/b")],
)
def test_names_that_the_registry_refuses_are_refused_at_once(key: str, value: str) -> None:
    config = compose_config("adv_train", ["+model=spec_vit_digits", "data=digits", f"{key}='{value}'"])
    with pytest.raises(UserError, match=f"{key}=.*give a name of up to"):
        typed_values(SECTIONS["adv_train"], config)
