"""Shards in an S3 bucket: a real server checks a key, answers ranges, stops and returns.

The server is npm's s3rver. The tests need the extra `s3` and npm, and skip without them.
"""

import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest

from certizoo import UserError, shards
from certizoo.ports import free_port
from certizoo.shards import remote
from tests.certizoo.shards import test_remote
from tests.certizoo.shards.test_remote import config, refusal, same, trained

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
PACKAGE = "s3rver@3.7.1"
KEY, BUCKET = "S3RVER", "toy"  # the server's own key, for name and secret
ROOT = f"s3://{BUCKET}/sets/toy"
folder = test_remote.folder  # the fixture


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


@pytest.fixture
def bucket(
    program: Path,
    tmp_path: Path,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Bucket]:
    """Serve the toy set, with keys in the environment."""
    s3fs = pytest.importorskip("s3fs", reason="the extra `s3` is not installed: pip install 'certizoo[s3]'")
    bucket = Bucket(program, tmp_path)
    monkeypatch.setattr(remote, "PAUSES", (0, 0))
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{bucket.port}")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    keys(monkeypatch, KEY)
    s3fs.S3FileSystem(use_listings_cache=False).put(f"{folder}/", ROOT.removeprefix("s3://") + "/", recursive=True)
    yield bucket
    bucket.stop()
    s3fs.S3FileSystem.clear_instance_cache()


def keys(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Set the server's secret, because it checks only names for signatures of version 4."""
    import s3fs

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", name)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", KEY)
    s3fs.S3FileSystem.clear_instance_cache()  # it caches connections by their options, of which there are none here


@pytest.mark.parametrize("workers", [0, 2])
def test_a_bucket_gives_the_batches_of_the_disk(bucket: Bucket, folder: Path, workers: int) -> None:
    here = config(str(folder), workers=workers, augment="flip_crop")
    there = config(ROOT, workers=workers, augment="flip_crop")
    assert same(trained(there), trained(here))
    assert same(trained(there, skip_batches=3), trained(here, skip_batches=3))
    assert any(".tar" in line and " 206 " in line for line in bucket.said), "shards are asked for by ranges"


def test_a_wrong_key_is_one_line(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    keys(monkeypatch, "WRONG")
    message = refusal(lambda: shards.find(config(ROOT), "train"))
    assert ROOT in message
    assert any(" 403 " in line for line in bucket.said)


def test_a_server_that_goes_in_mid_epoch_is_said_and_the_epoch_goes_on(
    bucket: Bucket,
    folder: Path,
) -> None:
    """Some batches of the shard fetched ahead still come; the epoch then resumes where it ended."""
    data = config(ROOT)
    expected, found = trained(config(str(folder))), shards.find(data, "train")
    seen = []

    def read() -> None:
        for batch in shards.train_loader(found, data, batch_size=8, epoch=1, seed=3, rank=1, world_size=2):
            seen.append(batch)
            if len(seen) == 1:
                bucket.stop()

    with pytest.raises(UserError, match="check that the server is up") as caught:
        read()
    assert "\n" not in str(caught.value)
    assert 0 < len(seen) < len(expected)
    bucket.start()
    assert same([*seen, *trained(data, skip_batches=len(seen))], expected)
