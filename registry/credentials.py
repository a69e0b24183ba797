"""Names and passwords: other processes get them by environment, and nothing is written or sent with them.

A command line is shown to everybody on the machine (`ps`); a configuration goes to MLflow, into the hand-over, onto the
card. Each of these gets it `redacted`.
"""

import os
import re
from collections.abc import Mapping
from typing import Any

URI, BACKEND = "MLFLOW_TRACKING_URI", "MLFLOW_BACKEND_STORE_URI"
SECRETS = ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN")
HIDDEN = "***"
PIPE = "pipe:"  # data.root=pipe:COMMAND: whatever stands in a command may be a secret; the name of its program is none

_WORD = r"(?:secret|token|passw(?:or)?d|passwd|api[_-]?key|access[_-]?key|credential|signature|authorization)"
_SECRET = re.compile(_WORD, re.I)  # within the name of a key
_VALUE = r"(?:\"[^\"]*\"|'[^']*'|[^\s\"',;&]+)"
# What stands before a secret, and the secret.
_PARTS = [
    re.compile(r"([?&][\w.-]*(?:sig|signature|token|secret|key|keyid|credential|password|auth)=)[^&\s\"']+", re.I),
    re.compile(r"(\b(?:proxy-)?authorization\s*[:=]\s*)(?:(?:bearer|basic|digest|token)\s+)?[^\s\"']+", re.I),
    re.compile(r"(\bbearer\s+)[^\s\"']+", re.I),
    re.compile(rf"([\w-]*{_WORD}\w*[\"']?\s*[:=]\s*){_VALUE}", re.I),
    re.compile(rf"(--?(?:user|u|{_WORD})[= ]){_VALUE}", re.I),
]


def environment(uri: str) -> dict[str, str]:
    """What lets a process elsewhere reach `uri` as this one does."""
    return {URI: uri} | {key: os.environ[key] for key in SECRETS if key in os.environ}


def without(text: str) -> str:
    """The text, with no password, signature or token in the URIs, headers and commands that it quotes."""
    if PIPE in text:
        text = re.sub(rf"({PIPE}\s*\S+)\s.*", rf"\1 {HIDDEN}", text, flags=re.DOTALL)
    # user:password@ and token@ of a URI. Both may hold '/', '@' and ':', so that all goes up to the word's last '@'.
    text = re.sub(r"://(?:[^\s/@:]*:\S*|[^\s/]*)@", "://", text)
    for part in _PARTS:
        text = part.sub(rf"\1{HIDDEN}", text)
    return text


def redacted(value: Any, name: str = "") -> Any:
    """A configuration, or the part of it under the key `name`, as it may leave the process: the same keys, and texts
    `without` what is secret, or hidden where the key itself says that they are."""
    if isinstance(value, Mapping):
        return {without(key) if isinstance(key, str) else key: redacted(of, str(key)) for key, of in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(of, name) for of in value]
    if isinstance(value, str):
        return HIDDEN if value and _SECRET.search(name) else without(value)
    return value
