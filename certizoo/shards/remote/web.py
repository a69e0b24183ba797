"""The limits of what web servers receive and may do: secrets only for named hosts, redirects only within a server.

~/.netrc is read for the hosts that this machine's user lists in CERTIZOO_NETRC (`CERTIZOO_NETRC=data.example.org`). The
library alone would send its content, also its `default`, to every host. A server may redirect to another path of its
own, or from http to https. Another host, port or scheme is refused, since it could make us request addresses inside a
network. Proxies come from the environment.
"""

import base64
import netrc
import os
from typing import Any
from urllib.parse import SplitResult, urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

from certizoo import UserError

ALLOWED = "CERTIZOO_NETRC"
PORTS = {"http": 80, "https": 443}


def options(url: str, timeout: int) -> dict[str, Any]:
    """Return the options of fsspec's file system for `url`. Raises UserError for a .netrc that cannot be read."""
    from aiohttp import ClientTimeout, TraceConfig

    trace = TraceConfig()
    trace.on_request_redirect.append(_refuse_to_leave)
    session = {
        "timeout": ClientTimeout(total=None, connect=timeout, sock_read=timeout),
        "trace_configs": [trace],
        "headers": {"Accept-Encoding": "identity", **_secret(urlsplit(url).hostname or "")},
        "auto_decompress": False,  # a small answer could expand to a large one
    }
    return {"client_kwargs": session, **_proxy(urlsplit(url))}


async def _refuse_to_leave(session: Any, context: Any, parameters: Any) -> None:
    source, target = str(parameters.url), parameters.response.headers.get("Location", "")
    try:
        stays = _same_server(urlsplit(source), urlsplit(urljoin(source, target)))
    except ValueError:  # an invalid port or host
        stays = False
    if not stays:
        raise UserError(
            f"{source} leads to {target[:200]}, which is another server; set data.root to that one if it is right"
        )


def _same_server(source: SplitResult, target: SplitResult) -> bool:
    """Return True for the same host, scheme and port, or for https instead of http at their default ports."""
    if target.username is not None or target.hostname != source.hostname:
        return False
    here, there = ((url.scheme, url.port or PORTS.get(url.scheme)) for url in (source, target))
    return here == there or (here, there) == (("http", 80), ("https", 443))


def _secret(host: str) -> dict[str, str]:
    """Return the header with the credentials of ~/.netrc (or $NETRC) for a host that the user has named."""
    if host not in os.environ.get(ALLOWED, "").split(","):
        return {}
    path = os.environ.get("NETRC") or os.path.expanduser("~/.netrc")
    try:
        found = netrc.netrc(path).authenticators(host)
    except (OSError, netrc.NetrcParseError) as error:
        raise UserError(f"{ALLOWED} names {host}, but {path} cannot be read ({error}); correct it") from None
    if found is None:
        raise UserError(f"{ALLOWED} names {host}, but {path} holds nothing for it; add it there")
    login, _, password = found
    return {"Authorization": "Basic " + base64.b64encode(f"{login}:{password}".encode()).decode()}


def _proxy(url: SplitResult) -> dict[str, str]:
    proxy = getproxies().get(url.scheme)
    return {"proxy": proxy} if proxy and not proxy_bypass(url.netloc) else {}
