"""Sentences of a TSV file as a source of shards: (UTF-8 bytes, label) each.

    sentence<TAB>label                the header names the columns; every other line is one sentence
    a charming and moving film<TAB>1

A quotation mark is a letter like any other: no field is quoted, and no sentence has a tab or a line break.
"""

import codecs
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from certizoo import UserError
from certizoo.text import plain, shown

MAX_LINE = 2**16  # bytes
MAX_BYTES = 2**31  # of the file
CONTROLS = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f]")
LABEL = re.compile(r"[0-9]{1,6}")


class Sentences(Sequence[tuple[bytes, int]]):
    """The sentences and labels of a TSV file.

    Args:
        path: the file.
        sentence: the name of the column of sentences.
        label: the name of the column of labels, whole numbers from 0.

    Raises:
        UserError: a column is missing, or a line is empty, quoted, not UTF-8, too long, or has a wrong label.
    """

    def __init__(self, path: Path, sentence: str = "sentence", label: str = "label") -> None:
        self.items: list[tuple[bytes, int]] = []
        lines = _lines(path)
        header = next(lines, (1, ""))[1].split("\t")
        places = [_place(path, header, name) for name in (sentence, label)]
        for number, line in lines:
            fields = line.split("\t")
            where = f"{path}, line {number}"
            if len(fields) != len(header):
                raise UserError(
                    f"{where} has {len(fields)} columns, but the header has {len(header)}; write one sentence a line, "
                    "without tabs and quoting"
                )
            text, given = (fields[place].strip() for place in places)
            self.items.append((_sentence(text, where), _label(given, where)))
        if not self.items:
            raise UserError(f"{path} holds no sentences below its header; give another file")

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]  # the overloads of Sequence add nothing here
        return self.items[index]


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Iterate over (number, line) of the file, read line by line."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE + 1), b""), 1):
                if len(line) > MAX_LINE or file.tell() > MAX_BYTES:
                    raise UserError(
                        f"{path}, line {number}: more than {MAX_LINE} bytes in a line or {MAX_BYTES} in the file; "
                        "split it"
                    )
                yield number, _decoded(line, f"{path}, line {number}").removesuffix("\n").removesuffix("\r")
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); give a TSV file of sentences and labels") from None


def _decoded(line: bytes, where: str) -> str:
    try:
        return line.removeprefix(codecs.BOM_UTF8).decode()
    except UnicodeDecodeError:
        raise UserError(f"{where} is not UTF-8 text; convert the file, such as by iconv -t UTF-8") from None


def _place(path: Path, header: Sequence[str], name: str) -> int:
    if header.count(name) != 1:
        columns = plain(", ".join(header))[:200]
        raise UserError(f"{path}: its header ({columns}) does not have one column {name}; name it by an option")
    return header.index(name)


def _sentence(text: str, where: str) -> bytes:
    if not text:
        raise UserError(f"{where} has no sentence; remove the line")
    if len(text) > 1 and text[0] == text[-1] == '"':
        raise UserError(f"{where}: the sentence is quoted; write the file without quoting (csv.QUOTE_NONE)")
    if found := CONTROLS.search(text):
        raise UserError(f"{where} holds the control character {shown(found[0])}; remove it")
    return text.encode()


def _label(text: str, where: str) -> int:
    if not LABEL.fullmatch(text):
        raise UserError(f"{where} has the label {shown(text)}; give the number of its class, 0, 1, ...")
    return int(text)
