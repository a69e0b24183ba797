"""Names and passwords: they pass to other processes by environment and are never written or sent.

A command line is visible to everyone on the machine (`ps`). A configuration reaches MLflow, the hand-over and the model
card. Each of these gets it `redacted`.
"""

import os
import re
from collections.abc import Mapping
from typing import Any

URI, BACKEND = "MLFLOW_TRACKING_URI", "MLFLOW_BACKEND_STORE_URI"
SECRETS = ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN")
HIDDEN = "***"
PIPE = "pipe:"  # data.root=pipe:COMMAND: anything in a command may be a secret, except the name of its program

_WORD = r"(?:secret|token|passw(?:or)?d|passwd|api[_-]?key|access[_-]?key|credential|signature|authorization)"
_SECRET = re.compile(_WORD, re.I)  # within the name of a key
_VALUE = r"(?:\"[^\"]*\"|'[^']*'|[^\s\"',;&]+)"
_URI = re.compile(r"://(?:[^\s/@:]*:\S*|[^\s/]*)@")
# Text before a secret, and the secret. Texts come from elsewhere: no pattern may take time quadratic in their length.
_PARTS = [
    re.compile(r"([?&][\w.-]*(?:sig|signature|token|secret|key|keyid|credential|password|auth)=)[^&\s\"']+", re.I),
    re.compile(r"(\b(?:proxy-)?authorization\s*[:=]\s*)(?:(?:bearer|basic|digest|token)\s+)?[^\s\"']+", re.I),
    re.compile(r"(\bbearer\s+)[^\s\"']+", re.I),
    re.compile(rf"(?<![\w-])(?=[\w-]*?{_WORD})([\w-]++[\"']?\s*[:=]\s*){_VALUE}", re.I),
    re.compile(rf"(--?(?:user|u|{_WORD})[= ]){_VALUE}", re.I),
]


def environment(uri: str) -> dict[str, str]:
    """Return the variables that let another process reach `uri` as this one does."""
    return {URI: uri} | {key: os.environ[key] for key in SECRETS if key in os.environ}


def without(text: str) -> str:
    """Return the text without passwords, signatures or tokens in the URIs, headers and commands that it quotes."""
    before, pipe, command = text.partition(PIPE)
    if len(words := command.split(maxsplit=1)) == 2:
        text = f"{before}{pipe}{words[0]} {HIDDEN}"
    # user:password@ and token@ of a URI. Both may contain '/', '@' and ':', so match up to the word's last '@'.
    text = re.sub(r"(?<!\S)\S+@", lambda word: _URI.sub("://", word[0]), text)
    for part in _PARTS:
        text = part.sub(rf"\1{HIDDEN}", text)
    return text


def redacted(value: Any, name: str = "") -> Any:
    """Return a configuration, or its part under the key `name`, in a form that may leave the process.

    The keys stay. Texts are returned `without` secrets, or hidden if the key itself names a secret.
    """
    if isinstance(value, Mapping):
        return {without(key) if isinstance(key, str) else key: redacted(of, str(key)) for key, of in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(of, name) for of in value]
    if isinstance(value, str):
        return HIDDEN if value and _SECRET.search(name) else without(value)
    return value
