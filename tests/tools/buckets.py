"""An S3 bucket of npm's s3rver."""

import shutil
import subprocess
import time
from pathlib import Path
from urllib.request import urlopen

import pytest

from certizoo.ports import free_port

PACKAGE = "s3rver@3.7.1"
KEY, BUCKET = "S3RVER", "toy"  # the server's own key, for name and secret


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("npm") is None:
        pytest.skip("no npm here to fetch s3rver with")
    place = tmp_path_factory.mktemp("npm")
    done = subprocess.run(["npm", "install", "--prefix", place, PACKAGE], capture_output=True, text=True, timeout=200)
    if done.returncode:
        pytest.skip(f"npm does not fetch s3rver: {done.stderr.strip()[-200:]}")
    return place / "node_modules" / ".bin" / "s3rver"


class Bucket:
    """The server, on one port whenever it runs; `said` is its log, with a line for each request."""

    def __init__(self, program: Path, place: Path) -> None:
        self.port, self._place = free_port(), place
        self._command = [program, "-d", place / "s3", "-a", "127.0.0.1", "-p", self.port, "--configure-bucket", BUCKET]
        self._log = place / "log"
        self.start()

    def start(self) -> None:
        with self._log.open("a") as log:
            words = [str(word) for word in self._command]
            self._process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT)
        end = time.monotonic() + 30
        while time.monotonic() < end and not self._answers():
            time.sleep(0.05)

    def _answers(self) -> bool:
        try:
            urlopen(f"http://127.0.0.1:{self.port}/", timeout=1).close()
        except OSError as error:  # 403 is an answer too
            return hasattr(error, "status")
        return True

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(10)

    @property
    def said(self) -> list[str]:
        return self._log.read_text().splitlines()
