"""The tokeniser of a text data set: one token a word, in JSON of the library `tokenizers`.

    "A charming film" -> lower case -> what spaces separate -> [3, 210, 17]

Number 0 is padding and 1 an unknown word. Of a file only its vocabulary is used: the tokeniser that is built from it
must write the same file, so that no expression of another author is run.

Letters: T tokens.
"""

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from certizoo import UserError
from certizoo.documents import read_json
from certizoo.files import write_whole

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PAD, UNKNOWN = "[PAD]", "[UNK]"
SUFFIX = ".tokenizer.json"  # NAME.tokenizer.json lies beside the shards of the set
MOST = 2**16  # words: a number has two bytes
LONGEST = 256  # characters of a word
RARE = 2  # occurrences below which a word of the training split counts as unknown
FIX = "use the file that `certizoo shards text` wrote, or that of the hand-over"


def train(sentences: Iterable[bytes], path: Path, most: int = MOST) -> int:
    """Write the tokeniser of the `most` most frequent words of these sentences; return the size of its vocabulary."""
    from tokenizers import trainers  # of an extra

    tokenizer = _of_words([])
    # Single words of hundreds of letters are not words; the library counts the rest.
    trainer = trainers.WordLevelTrainer(
        vocab_size=most, min_frequency=RARE, special_tokens=[PAD, UNKNOWN], show_progress=False
    )
    tokenizer.train_from_iterator((text.decode() for text in sentences), trainer)
    vocabulary = tokenizer.get_vocab()
    words = [word for word in sorted(vocabulary, key=vocabulary.__getitem__) if len(word) <= LONGEST]
    tokenizer = _of_words(words)
    write_whole(path, tokenizer.to_str())
    return len(words)


@cache
def load(path: Path) -> "Tokens":
    """Return the tokeniser of a file, which may be of anybody. Raises UserError."""
    content = read_json(path)
    try:
        vocabulary = content["model"]["vocab"]
        words = sorted(vocabulary, key=vocabulary.__getitem__)
        fits = [vocabulary[word] for word in words] == list(range(len(words))) and words[:2] == [PAD, UNKNOWN]
        fits = fits and len(words) <= MOST and max(map(len, words)) <= LONGEST
    except (KeyError, TypeError, AttributeError, ValueError):
        fits, words = False, []
    if not fits:
        raise UserError(f"{path} is not a tokeniser of words with {PAD} and {UNKNOWN} first; {FIX}")
    tokenizer = _of_words(words)
    if json.loads(tokenizer.to_str()) != content:
        raise UserError(f"{path} is another tokeniser than its vocabulary makes here; {FIX}")
    return Tokens(tokenizer, words)


class Tokens:
    """A tokeniser and its words by number."""

    def __init__(self, tokenizer: "Tokenizer", words: list[str]) -> None:
        self.tokenizer, self.words = tokenizer, words

    def numbers(self, text: str, most: int) -> list[int]:
        """Return the numbers of the first `most` tokens."""
        return list(self.tokenizer.encode(text).ids[:most])


def bytes_of(numbers: list[int], most: int) -> NDArray[np.uint8]:
    """Return numbers as pairs of bytes, padded by 0: (T, 2) for T = `most`."""
    padded = np.zeros(most, "<u2")
    padded[: len(numbers)] = numbers
    return padded.view(np.uint8).reshape(most, 2)


def _of_words(words: list[str]) -> "Tokenizer":
    """Return the tokeniser of these words."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers  # of an extra

    vocabulary = {word: number for number, word in enumerate(words or [PAD, UNKNOWN])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer
