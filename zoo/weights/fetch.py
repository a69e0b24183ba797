"""Fetch one file from a web server or the Hugging Face hub, and accept it only with the requested sha256.

The digest makes the source harmless: an attacker who controls the server, its name or the connection can only make the
download fail. Reading stops at a size limit, and the file gets its name only when it is complete. No pickle: the files
are safetensors and YAML, which their readers bound.
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
LARGE = 16 * 2**30  # bytes of weights of unknown size
CHUNK, SECONDS = 2**20, 60.0


def is_remote(place: object) -> bool:
    return isinstance(place, str) and place.startswith((HUB, "https://", "http://"))


def pinned(place: str) -> tuple[str, str]:
    """Split 'URL#sha256=HEX' into URL and HEX. Raises UserError without a digest.

    Without one, others could change the weights behind the name.
    """
    url, _, digest = place.partition("#sha256=")
    if not DIGEST.fullmatch(digest):
        raise UserError(f"{place[:200]} has no digest; write {url[:200]}#sha256=HEX, as `sha256sum FILE` prints it")
    if not urlsplit(url).path.endswith(".safetensors") and not url.endswith(".safetensors"):
        raise UserError(
            f"{url[:200]} is not a .safetensors file, the only kind that is fetched; save the state dict as one"
        )
    return url, digest


def within(place: str, file: str) -> str:
    """Return the file in a folder on the web, on the hub, or on this machine."""
    return f"{place.rstrip('/')}/{file}"


def fetched(place: str, digest: str, path: Path, most: int, advice: str) -> Path:
    """Return `path` with the content of this sha256, as it is or fetched from `place`. Raises UserError."""
    if path.is_file() and sha256(path) == digest:
        return path
    with disk_errors("free some space, or set CERTIZOO_CACHE to another folder"):
        path.parent.mkdir(parents=True, exist_ok=True)
        own = path.with_name(f"{path.name}.{os.getpid()}")  # ranks fetch at the same time
        with whole_file(own) as part, part.open("wb") as file:
            found = hashlib.sha256()
            for chunk in _chunks(place, most, advice):
                found.update(chunk)
                file.write(chunk)
            if found.hexdigest() != digest:
                raise UserError(f"{place} has sha256 {found.hexdigest()[:16]}..., not {digest[:16]}...; {advice}")
        os.replace(own, path)
    return path


def cache_folder() -> Path:
    """Return the folder for fetched weights."""
    return files.cache_folder("weights")


def _chunks(place: str, most: int, advice: str) -> Iterator[bytes]:
    with _opened(place, advice) as file:
        read = 0
        try:
            while chunk := file.read(CHUNK):
                read += len(chunk)
                if read > most:
                    raise UserError(f"{place} is larger than the expected {most} bytes; {advice}")
                yield chunk
        except (OSError, ValueError) as error:
            raise UserError(f"{place} was cut off after {read} bytes ({error}); {advice}") from None


@contextmanager
def _opened(place: str, advice: str) -> Iterator[BinaryIO]:
    url = _hub_url(place) if place.startswith(HUB) else place
    try:
        file = _web().open(Request(url), timeout=SECONDS) if is_remote(url) else open(url, "rb")  # noqa: SIM115
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) if isinstance(error, URLError) else error
        raise UserError(f"{place} could not be fetched ({reason or error}); {advice}") from None
    with file:
        yield file


def _web() -> OpenerDirector:
    """Return an opener for http and https, also after a redirect.

    urllib's own opener would follow a redirect to ftp as well.
    """
    opener = OpenerDirector()
    answers = (HTTPErrorProcessor(), HTTPDefaultErrorHandler(), _WebAlone())
    for handler in (ProxyHandler(), HTTPHandler(), HTTPSHandler(), *answers):
        opener.add_handler(handler)
    return opener


class _WebAlone(HTTPRedirectHandler):
    """Refuses redirects away from the web, and from https to http."""

    def redirect_request(self, req, fp, code, msg, headers, newurl):  # type: ignore[no-untyped-def]
        allowed = ("https://",) if req.full_url.startswith("https:") else ("https://", "http://")
        if not newurl.startswith(allowed):
            raise URLError(f"the server redirects to {newurl[:100]}")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _hub_url(place: str) -> str:
    """Return the hub's address of hf-hub:OWNER/REPOSITORY[@REVISION]/FILE."""
    found = HUB_PLACE.fullmatch(place)
    if not found or not found[3]:
        raise UserError(f"{place[:200]} is not a file of the hub; write hf-hub:OWNER/REPOSITORY@REVISION/FILE")
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    return f"{endpoint.rstrip('/')}/{found[1]}/resolve/{found[2] or 'main'}{found[3]}"
