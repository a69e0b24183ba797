"""Foreign files are checked for size and depth before they are parsed."""

import time
from pathlib import Path

import pytest

from certizoo import UserError
from certizoo.documents import MAX_BYTES, MAX_DEPTH, read_json, read_yaml, yaml_of
from certizoo.text import plain
from tests.tools.cases import mostly_slow

BOMB = "a0: &a0 [x,x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1},*a{n - 1},*a{n - 1}]\n" for n in range(1, 40))
HOSTILE = {
    "aliases": (BOMB, "values"),
    "aliases of aliases, deep": (
        "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 60)),
        "levels",
    ),
    "merged aliases": (
        "a0: &a0 {x: 1}\n"
        + "".join(f"a{n}: &a{n} {{{', '.join(f'k{k}: *a{n - 1}' for k in range(9))}}}\n" for n in range(1, 9)),
        "values",
    ),
    "an alias within itself": ("a: &a [*a]", "alias"),
    "an alias of nothing": ("a: *b", "alias"),
    "python object": ("a: !!python/object/apply:os.system ['true']", "tag"),
    "local tag": ("a: !x 1", "tag"),
    "depth in brackets": ("a: " + "[" * 10_000, "levels"),
    "closed depth in brackets": ("a: " + "[" * 100_000 + "]" * 100_000, "levels"),
    "depth in indents": ("\n".join(" " * n + f"k{n}:" for n in range(MAX_DEPTH + 2)), "levels"),
    "many values": ("[" + "1," * 300_000 + "]", "values"),
    "too large": ("# " + "x" * MAX_BYTES, "larger"),
    "escape sequence": ("a: \x1b[2J", "not readable YAML"),
    "no YAML": ("a: [", "not readable YAML"),
    "no date": ("a: 2020-13-45", "not readable YAML"),
    "int of many digits": ("a: " + "9" * 10_000, "not readable YAML"),
    "sexagesimal of many digits": ("a: " + "9:" * 5_000 + "9", ""),
}


@pytest.mark.hostile
@pytest.mark.parametrize("name", mostly_slow(HOSTILE, *(HOSTILE.keys() - {"many values"})))
def test_hostile_yaml_is_refused_in_one_line_and_at_once(name: str, tmp_path: Path) -> None:
    text, words = HOSTILE[name]
    (tmp_path / "config.yaml").write_text(text)
    start = time.monotonic()
    if words:
        with pytest.raises(UserError, match=words) as error:
            read_yaml(tmp_path / "config.yaml")
        assert "\n" not in str(error.value)
        assert "\x1b" not in str(error.value)
    else:
        read_yaml(tmp_path / "config.yaml")
    assert time.monotonic() - start < 20


@pytest.mark.hostile
@pytest.mark.parametrize("text", ["[" * 100_000, "x" * (MAX_BYTES + 1), "{", '"\\ud800', "1" * 10_000])
def test_hostile_json_is_refused_in_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(UserError, match=r"a\.json"):
        read_json(tmp_path / "a.json")


def test_few_aliases_are_read_and_none_are_written(tmp_path: Path) -> None:
    """Earlier hand-overs contain aliases."""
    (tmp_path / "a.yaml").write_text("a: &x [1, 2]\nb: *x\n")
    said = read_yaml(tmp_path / "a.yaml")
    assert said == {"a": [1, 2], "b": [1, 2]}
    assert said["a"] is said["b"]
    assert yaml_of(said) == "a:\n- 1\n- 2\nb:\n- 1\n- 2\n"


def test_plain_values_come_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("a: {b: [1, 2.5, null, 'x']}\n")
    assert read_yaml(tmp_path / "a.yaml") == {"a": {"b": [1, 2.5, None, "x"]}}


@pytest.mark.hostile
@pytest.mark.parametrize("text", ["\x1b[31mred", "\x9b2J", "a\rb", "\u202egnp.exe", "\u2066x", "\x08\x08", "a\x00b"])
def test_a_message_never_acts_on_the_terminal(text: str) -> None:
    shown = str(UserError(f"no model {text}"))
    assert all(letter.isprintable() for letter in shown)
    assert shown.startswith("no model ")
    assert plain(plain(text)) == plain(text)
