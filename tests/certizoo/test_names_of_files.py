"""A name from a command line or a file becomes exactly one folder below its parent."""

import pytest

from certizoo import UserError
from certizoo.files import require_file_name

WRONG = [
    "../../x", "/etc/x", "", "a/b", "a\\b", ".", "..", ".hidden", "~", "~root", "-rf", "a\0b", "a\nb", "\x1b[2J",
    "a b", "a\u202eb",    "x" * 201, "CON", "nul.txt", "com1", "x.", "$(x)", "a;b", "a%2fb", None, 5, ["x"], b"x",
]  # fmt: skip


@pytest.mark.hostile
@pytest.mark.parametrize("name", WRONG, ids=repr)
def test_a_name_that_leaves_its_folder_is_refused(name: object) -> None:
    with pytest.raises(UserError, match="name="):
        require_file_name(name, "name")


@pytest.mark.parametrize("name", ["spec_vit_b-imagenet-s0", "l2-20261122-101500-0001", "a.b", "x=1+2", "console"])
def test_ordinary_names_are_kept(name: str) -> None:
    require_file_name(name, "name")
