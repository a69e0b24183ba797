"""The page as a server on this machine, by the standard library alone.

One page and one request type need no framework: gradio is a hundred megabytes of dependencies that contact other hosts,
and flask is here only through mlflow.

Access: on a loopback address, any client that uses the server's own name. Pages of other sites are refused, whether
they use a form or a name that resolves to this machine (DNS rebinding). On any other address, clients with the token.
"""

import base64
import hmac
import json
import secrets
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import BoundedSemaphore, Lock, Timer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from certify.photos import page, picture
from certify.photos.photo import MAX_BYTES, photo
from certify.photos.predict import Answer, Predictor
from certify.shared.certificate import UnsoundCertificate
from certizoo import UserError
from certizoo.config.schema import Port, Section
from certizoo.ports import LOOPBACK

EVERY = ("0.0.0.0", "::")  # all addresses of this machine
AT_ONCE = 8  # connections; further ones are closed
SECONDS = 30  # that a connection may be silent
PATIENCE = 120  # seconds within which a whole request must arrive
BODY = "application/octet-stream"  # a form cannot send it, so another site's page needs a preflight request
MIN_TOKEN = 16


@dataclass(frozen=True)
class Place(Section):
    """The address of the page: configs/serve.yaml."""

    host: str = "127.0.0.1"
    port: Port = 8000
    token: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.host:
            raise UserError("host= must be an address of this machine, such as 127.0.0.1 or 0.0.0.0")
        if self.token is not None and len(self.token) < MIN_TOKEN:
            raise UserError(
                f"token must be a quoted string of at least {MIN_TOKEN} characters; change it, or remove it"
            )

    @property
    def local(self) -> bool:
        return self.host in LOOPBACK

    @property
    def needed(self) -> str | None:
        """The token that every request must carry."""
        return self.token or (None if self.local else secrets.token_urlsafe(24))


class Server(ThreadingHTTPServer):
    """A server that answers one photograph at a time and accepts few connections at once."""

    daemon_threads = True
    request_queue_size = 16

    def __init__(self, predict: Predictor, place: Place) -> None:
        self.predict, self.place, self.token = predict, place, place.needed
        self.address_family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
        self.working, self.connections = Lock(), BoundedSemaphore(AT_ONCE)
        try:
            super().__init__((place.host, place.port), Handler)
        except OSError as error:
            raise UserError(
                f"{place.host} port {place.port} is not available ({error.strerror or error}); set another: port=0"
            ) from None

    @property
    def url(self) -> str:
        host, port = self.place.host, self.server_address[1]
        shown = socket.gethostname() if host in EVERY else f"[{host}]" if ":" in host else host
        return f"http://{shown}:{port}/" + (f"?token={self.token}" if self.token else "")

    def names(self) -> set[str]:
        """Return the names that a browser uses for this server on a loopback address."""
        return {f"{name}:{self.server_address[1]}" for name in ("127.0.0.1", "localhost", "[::1]")}

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self.connections.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.connections.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a client that disconnected."""


class Handler(BaseHTTPRequestHandler):
    server: Server
    timeout = SECONDS
    server_version, sys_version = "certizoo", ""

    def setup(self) -> None:
        """Start a timer, within which the whole request must arrive, however slowly it is sent."""
        super().setup()
        self.patience = Timer(PATIENCE, self._hang_up)
        self.patience.daemon = True
        self.patience.start()

    def finish(self) -> None:
        self.patience.cancel()
        super().finish()

    def _hang_up(self) -> None:
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        if not self._may_ask((parse_qs(parts.query).get("token") or [""])[0]):
            return
        if parts.path != "/":
            self._say(404, "there is only the page /")
            return
        nonce = secrets.token_urlsafe(16)
        predict = self.server.predict
        html = page.html(predict.title, predict.names, predict.asked.norm, nonce)
        self._send(200, html.encode(), "text/html; charset=utf-8", page.policy(nonce))

    def do_POST(self) -> None:
        """Answer an encoded photograph with JSON, pictures included."""
        if not self._may_ask(self.headers.get("X-Token", "")) or not self._is_ours():
            return
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or self.headers.get("Content-Type") != BODY:
            self._say(400, f"send one photograph as {BODY}, with its length")
        elif int(length) > MAX_BYTES:
            self._say(413, f"the photograph is larger than {MAX_BYTES >> 20} MiB")
        else:
            data = self.rfile.read(int(length))
            self.patience.cancel()
            if not self.server.working.acquire(timeout=SECONDS):
                self._say(503, "another photograph is being processed; try again")
                return
            try:
                self._answer(data)
            finally:
                self.server.working.release()

    def _answer(self, data: bytes) -> None:
        predict, asked = self.server.predict, parse_qs(urlsplit(self.path).query)
        name = (asked.get("name") or ["photo"])[0][:200]
        try:
            given = photo(data, name, predict.channels, predict.size)
            answer = predict(given, asked["norm"][0] if "norm" in asked else None)
        except (UserError, UnsoundCertificate) as error:
            self._say(400, str(error))
        else:
            self._send(200, json.dumps(said(answer)).encode(), "application/json", page.NOTHING)

    def _may_ask(self, token: str) -> bool:
        """Return whether the request has the token, or uses the server's own name on a loopback address."""
        server = self.server
        if server.token is not None:
            if hmac.compare_digest(token.encode(), server.token.encode()):
                return True
            self._say(403, "the address needs ?token=, which the command prints")
            return False
        if self.headers.get("Host", "") in server.names():
            return True
        self._say(403, "this page answers only at its own address, which the command prints")
        return False

    def _is_ours(self) -> bool:
        """Return whether the request comes from this page or from no page; other pages do not know the token."""
        if self.server.token is not None:
            return True
        origin = self.headers.get("Origin")
        if origin in (None, f"http://{self.headers.get('Host', '')}"):
            return True
        self._say(403, "pages of other sites are refused")
        return False

    def _say(self, status: int, words: str) -> None:
        self._send(status, json.dumps({"error": words}).encode(), "application/json", page.NOTHING)

    def _send(self, status: int, content: bytes, kind: str, policy: str) -> None:
        self.send_response(status)
        for key, value in {
            "Content-Type": kind,
            "Content-Length": str(len(content)),
            "Content-Security-Policy": policy,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",  # the address may contain the token
            "Cache-Control": "no-store",
        }.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: a line would contain the token and text from strangers."""


def said(answer: Answer) -> dict[str, Any]:
    """Return an answer as JSON content for the page."""
    shown = [
        {"title": title, "note": note, "src": f"data:image/png;base64,{base64.b64encode(picture.png(image)).decode()}"}
        for title, note, image in picture.panels(answer)
    ]
    words = {"words": answer.words(), "scale": answer.scale, "proved": answer.proved, "found": answer.found}
    return answer.row() | words | {"panels": shown}


def serve_forever(predict: Predictor, place: Place, say: Callable[[str], None]) -> None:
    """Serve until Ctrl-C."""
    with Server(predict, place) as server:
        say(server.url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            say("stopped")
