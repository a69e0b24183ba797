"""A web server of a folder on loopback that counts requests and misbehaves where told."""

import gzip
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Server(ThreadingHTTPServer):
    """A server with planted faults.

    `fault` of a name says how its bytes are sent, `times` how often before it is sent correctly. `leads` maps a name to
    another address. `secrets` collects every Authorization header. With `ranges`, parts of files are sent on request;
    `sent` counts their bytes.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
        self.gets: Counter[str] = Counter()
        self.fault: dict[str, str] = {}
        self.leads: dict[str, str] = {}
        self.secrets: list[str] = []
        self.times = 10**9
        self.delay = 0.0
        self.ranges, self.sent = False, 0
        self.over = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(SimpleHTTPRequestHandler):
    server: Server

    def do_HEAD(self) -> None:
        if not self.led_away():
            super().do_HEAD()

    def led_away(self) -> bool:
        self.server.secrets += self.headers.get_all("Authorization", [])
        target = self.server.leads.get(self.path.lstrip("/"))
        if target is not None:
            self.send_response(302)
            self.send_header("Location", target)
            self.send_header("Content-Length", "0")
            self.end_headers()
        return target is not None

    def do_GET(self) -> None:
        name = self.path.lstrip("/")
        self.server.gets[name] += 1
        if self.led_away():
            return
        fault = self.server.fault.get(name)
        part = self.headers.get("Range") if self.server.ranges else None
        if part is None and (fault is None or self.server.gets[name] > self.server.times):
            time.sleep(self.server.delay)
            super().do_GET()
            return
        content = (Path(self.directory) / name).read_bytes()
        if part is not None:
            begin, last = map(int, part.removeprefix("bytes=").split("-"))
            content = content[begin : last + 1]
            self.server.sent += len(content)
        self.send_response(200 if part is None else 206)
        if fault == "swollen":
            self.send_header("Content-Encoding", "gzip")
        elif fault != "long":
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if fault is None or self.server.gets[name] > self.server.times:
            self.wfile.write(content)
        elif fault == "silent":
            self.server.over.wait(60)
        elif fault == "cut":
            self.wfile.write(content[: len(content) // 2])
        elif fault == "bit":
            self.wfile.write(bytes([content[0] ^ 1]) + content[1:])
        elif fault == "swollen":
            self.wfile.write(gzip.compress(bytes(2**27)))
        elif fault == "long":
            self.wfile.write(content + b"\0")

    def log_message(self, format: str, *args: object) -> None:
        """Keep the log out of the tests' output."""


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    server = Server(folder)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.over.set()
        server.shutdown()
        server.server_close()
