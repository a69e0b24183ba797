"""Shards in an S3 bucket: a real server checks a key, answers ranges, stops and returns.

The server is npm's s3rver. The tests need the extra `s3` and npm, and skip without them.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from certizoo import UserError, shards
from certizoo.shards.remote import fetch
from tests.tools import buckets, remote_shards
from tests.tools.buckets import BUCKET, KEY, Bucket
from tests.tools.remote_shards import config, refusal, same, trained

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
ROOT = f"s3://{BUCKET}/sets/toy"
folder, program = remote_shards.folder, buckets.program  # fixtures


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
    monkeypatch.setattr(fetch, "PAUSES", (0, 0))
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
