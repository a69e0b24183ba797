"""Shards in object stores and on web servers; the only module that imports fsspec.

Passwords and keys come from where the libraries look for them (environment, ~/.aws, fsspec's own configuration; for web
servers see web.py), never from `data.root`, which is written into every run's config.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http import HTTPStatus
from io import UnsupportedOperation
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import fsspec

from certizoo import UserError
from certizoo.shards.remote import web

CHUNK = 8 * 2**20  # bytes requested at once
AT_ONCE = 16  # requests to a web server, which has no listing
# protocol -> the package that fsspec needs for it
PACKAGES = {
    "s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs",
    "http": "aiohttp", "https": "aiohttp", "file": "fsspec",
}  # fmt: skip


@dataclass(frozen=True)
class Store:
    """The folder `url`. `timeout`: seconds to wait for a connection or for the next bytes (http, https, s3)."""

    url: str
    timeout: int

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        web = parts.scheme in ("http", "https")
        if parts.scheme not in PACKAGES or "::" in self.url:
            raise UserError(f"data.root={self.url}: no such protocol; use a folder, pipe:, or one of {list(PACKAGES)}")
        if parts.password is not None or (web and parts.username is not None):
            raise UserError(
                f"data.root={parts.scheme}://... holds a name or password; give them by environment, or by "
                "~/.netrc and CERTIZOO_NETRC=HOST"
            )
        if parts.scheme == "file" and not self.url.startswith("file:///"):
            raise UserError(f"data.root={self.url} is not an absolute path; use file:///FOLDER")
        if parts.scheme != "file" and (parts.query or parts.fragment or not parts.netloc):
            raise UserError(f"data.root={self.url} is not a folder; use {parts.scheme}://HOST_OR_BUCKET/FOLDER")

    def where(self, name: str) -> str:
        return f"{self.url.rstrip('/')}/{name}"

    def chunks(self, name: str, begin: int = 0, end: int | None = None) -> Iterator[bytes]:
        """Iterate over bytes begin..end of a file. Raises the library's own errors, or UnsupportedOperation."""
        how: dict[str, Any] = {"cache_type": "none"}
        if self._web:  # one stream; with a known size, fsspec requests none first
            how = {"block_size": 0, "size": 1}
            how |= {} if end is None else {"headers": {"Range": f"bytes={begin}-{end - 1}"}}
        with self._files().open(self.where(name), "rb", **how) as file:
            if end is not None and self._web and file.r.status != HTTPStatus.PARTIAL_CONTENT:
                raise UnsupportedOperation("the server sends whole files only")
            if begin and not self._web:
                file.seek(begin)
            while chunk := file.read(CHUNK if end is None else min(CHUNK, end - begin)):
                begin += len(chunk)
                yield chunk

    def sizes(self, names: Sequence[str]) -> dict[str, int | None]:
        """Return the sizes (None: unknown) of those files that exist."""
        if self._web:
            with ThreadPoolExecutor(AT_ONCE) as pool:
                return {name: size for one in pool.map(self._asked, names) for name, size in one.items()}
        files = self._files()
        files.invalidate_cache()
        listed = {Path(entry["name"]).name: entry["size"] for entry in files.ls(self.url, detail=True)}
        return {name: int(listed[name]) for name in names if name in listed}

    def _asked(self, name: str) -> dict[str, int | None]:
        try:
            return {name: self._files().info(self.where(name))["size"]}
        except FileNotFoundError as error:  # fsspec reports every failure as this error
            if getattr(error.__cause__, "status", None) in (404, 410):
                return {}
            raise error.__cause__ or error from None

    @property
    def _web(self) -> bool:
        return self.url.startswith("http")

    def _files(self) -> Any:
        """Return fsspec's file system, new in each process and thread: its connections survive neither."""
        protocol = self.url.partition(":")[0]
        try:
            return fsspec.filesystem(protocol, **self._options(protocol))
        except ImportError:
            package = PACKAGES[protocol]
            raise UserError(
                f"data.root={self.url} needs {package}, which is not installed; pip install {package}"
            ) from None

    def _options(self, protocol: str) -> dict[str, Any]:
        if self._web:
            return web.options(self.url, self.timeout)
        if protocol == "s3":
            return {"config_kwargs": {"connect_timeout": self.timeout, "read_timeout": self.timeout}}
        return {}
