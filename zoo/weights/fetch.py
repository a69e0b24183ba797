"""One file from a web server or the Hugging Face hub, which counts only if its sha256 is the one that was asked for.

The digest is what makes a place harmless: whoever holds the server, the name of it or the wire can refuse, and nothing
else. What comes is read no further than its bound, and has its name only once it is whole. No pickle: the files are
safetensors and YAML, which their readers bound.
"""

import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO
from urllib.error import URLError
from urllib.parse import urlsplit
from urllib.request import (
    HTTPDefaultErrorHandler,
    HTTPErrorProcessor,
    HTTPHandler,
    HTTPRedirectHandler,
    HTTPSHandler,
    OpenerDirector,
    ProxyHandler,
    Request,
)

from certizoo import UserError, files
from certizoo.files import disk_errors, sha256, whole_file

HUB = "hf-hub:"
HUB_PLACE = re.compile(r"hf-hub:([\w.-]+/[\w.-]+)(?:@([\w.-]+))?((?:/[\w.-]+)*)")
DIGEST = re.compile(r"[0-9a-f]{64}")
SMALL = 4 * 2**20  # bytes of a configuration
LARGE = 16 * 2**30  # of weights whose size nobody said
CHUNK, SECONDS = 2**20, 60.0


def is_remote(place: object) -> bool:
    return isinstance(place, str) and place.startswith((HUB, "https://", "http://"))


def pinned(place: str) -> tuple[str, str]:
    """'URL#sha256=HEX' -> URL, HEX. Raises UserError without a digest: weights of a name that others may change are
    nobody's in particular."""
    url, _, digest = place.partition("#sha256=")
    if not DIGEST.fullmatch(digest):
        raise UserError(f"{place[:200]} says no digest; write {url[:200]}#sha256=HEX, as `sha256sum FILE` prints it")
    if not urlsplit(url).path.endswith(".safetensors") and not url.endswith(".safetensors"):
        raise UserError(f"{url[:200]} is no .safetensors, and nothing else is fetched; save the state dict as that")
    return url, digest


def within(place: str, file: str) -> str:
    """The file in a folder: of the web, of the hub, of this machine."""
    return f"{place.rstrip('/')}/{file}"


def fetched(place: str, digest: str, path: Path, most: int, mend: str) -> Path:
    """`path` with the content of this sha256: as it is there, or from `place`. Raises UserError with `mend`."""
    if path.is_file() and sha256(path) == digest:
        return path
    with disk_errors("make room, or name another folder: CERTIZOO_CACHE=FOLDER"):
        path.parent.mkdir(parents=True, exist_ok=True)
        own = path.with_name(f"{path.name}.{os.getpid()}")  # ranks fetch side by side
        with whole_file(own) as part, part.open("wb") as file:
            found = hashlib.sha256()
            for chunk in _chunks(place, most, mend):
                found.update(chunk)
                file.write(chunk)
            if found.hexdigest() != digest:
                raise UserError(f"{place} has sha256 {found.hexdigest()[:16]}..., not {digest[:16]}...; {mend}")
        os.replace(own, path)
    return path


def cache_folder() -> Path:
    """Where fetched weights are kept."""
    return files.cache_folder("weights")


def _chunks(place: str, most: int, mend: str) -> Iterator[bytes]:
    with _opened(place, mend) as file:
        read = 0
        try:
            while chunk := file.read(CHUNK):
                read += len(chunk)
                if read > most:
                    raise UserError(f"{place} is larger than {most} bytes, which these weights are not; {mend}")
                yield chunk
        except (OSError, ValueError) as error:
            raise UserError(f"{place} broke off after {read} bytes ({error}); {mend}") from None


@contextmanager
def _opened(place: str, mend: str) -> Iterator[BinaryIO]:
    url = _hub_url(place) if place.startswith(HUB) else place
    try:
        file = _web().open(Request(url), timeout=SECONDS) if is_remote(url) else open(url, "rb")  # noqa: SIM115
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) if isinstance(error, URLError) else error
        raise UserError(f"{place} could not be fetched ({reason or error}); {mend}") from None
    with file:
        yield file


def _web() -> OpenerDirector:
    """http and https, also behind a redirection; urllib's own opener would follow one to ftp as well."""
    opener = OpenerDirector()
    answers = (HTTPErrorProcessor(), HTTPDefaultErrorHandler(), _WebAlone())
    for handler in (ProxyHandler(), HTTPHandler(), HTTPSHandler(), *answers):
        opener.add_handler(handler)
    return opener


class _WebAlone(HTTPRedirectHandler):
    """No redirection out of the web, nor from https to http."""

    def redirect_request(self, req, fp, code, msg, headers, newurl):  # type: ignore[no-untyped-def]
        allowed = ("https://",) if req.full_url.startswith("https:") else ("https://", "http://")
        if not newurl.startswith(allowed):
            raise URLError(f"the server leads to {newurl[:100]}")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _hub_url(place: str) -> str:
    """hf-hub:OWNER/REPOSITORY[@REVISION]/FILE as the hub's address of that file."""
    found = HUB_PLACE.fullmatch(place)
    if not found or not found[3]:
        raise UserError(f"{place[:200]} is no file of the hub; write hf-hub:OWNER/REPOSITORY@REVISION/FILE")
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    return f"{endpoint.rstrip('/')}/{found[1]}/resolve/{found[2] or 'main'}{found[3]}"
