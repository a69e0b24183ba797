"""A search without a common file system: checkpoints, hand-overs and certificates go to a bucket."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.request import urlopen

import pytest
from pyarrow.fs import FileSelector, FileSystem

from certizoo.ports import free_port
from certizoo.processes import end_group
from certizoo.registry import browse
from tests.tools import buckets
from tests.tools.buckets import BUCKET, KEY, Bucket
from tests.tools.tuning_runs import SMALL, begin, finish, finished, node_apart, shared_server, two_nodes
from tuning.trial import PATIENCE_SECONDS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
program = buckets.program  # the fixture


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Start Moto's server, since npm's s3rver fails when folders are listed while they are written."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(tmp_path / "moto"), "moto[server]"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode:
        pytest.skip(f"pip does not fetch moto: {done.stderr.strip()[-200:]}")
    keys(monkeypatch, KEY)
    port = free_port()
    with (tmp_path / "moto.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
            env=os.environ | {"PYTHONPATH": str(tmp_path / "moto")}, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip
    try:
        deadline, place = time.monotonic() + 60, where(BUCKET, port)
        while time.monotonic() < deadline and process.poll() is None:
            with suppress(OSError), urlopen(f"http://127.0.0.1:{port}/", timeout=2):
                break
        files, folder = FileSystem.from_uri(place + "&allow_bucket_creation=true")
        files.create_dir(folder)
        yield where(f"{BUCKET}/searches", port)
    finally:
        end_group(process, PATIENCE_SECONDS)


def where(path: str, port: int) -> str:
    return f"s3://{path}?scheme=http&region=us-east-1&endpoint_override=127.0.0.1:{port}"


def keys(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", name)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", KEY)


def test_a_trial_goes_on_from_the_bucket_where_its_node_is_lost(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second node has its own disk in place of the search's folder."""
    files, folder = FileSystem.from_uri(bucket)
    own = tmp_path / "runs" / "tune"
    with shared_server(tmp_path) as url, two_nodes(monkeypatch) as (cluster, other):
        cluster.remove_node(other)
        with node_apart(cluster, own):
            search = ("--space", "msvp", "--num-samples", "2", "--scheduler", "none", "--name", "far")
            driver = begin(tmp_path, *search, "--storage", bucket, "--", "train.epochs=16", *SMALL, uri=url)
            deadline = time.monotonic() + 400
            while len(trials_in(files, f"{folder}/far", "complete.json")) < 2:
                assert time.monotonic() < deadline
                assert driver.poll() is None, (tmp_path / "tune.log").read_text()
                time.sleep(1)
        status, output = finish(driver, tmp_path, 600)
        versions = browse.versions("spec_vit_digits", url)
    assert status == 0, output
    assert len(versions) == 2
    for name in ("handover/model.safetensors", "certificate/certificate.json"):
        assert len(trials_in(files, f"{folder}/far", name)) == 2
    here = own / "far" / "trials"
    assert len(finished(own / "far")) == 2, "both ended on the node that is left"
    assert any("resuming" in log.read_text() for log in here.glob("*/run-1.log")), "the moved trial began anew"


def trials_in(files: FileSystem, search: str, ending: str) -> set[str]:
    """Return the trials of which the bucket has a file with this ending."""
    found = files.get_file_info(FileSelector(search, recursive=True, allow_not_found=True))
    return {one.path.removeprefix(f"{search}/").partition("/")[0] for one in found if one.path.endswith(ending)}


def test_a_wrong_key_is_said_before_anything_begins(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Bucket(program, tmp_path)
    keys(monkeypatch, "WRONG")
    words = ("--space", "msvp", "--num-samples", "1", "--name", "keyless")
    try:
        driver = begin(tmp_path, *words, "--storage", where(f"{BUCKET}/searches", int(server.port)))
        status, output = finish(driver, tmp_path, 200)
    finally:
        server.stop()
    assert status == 2
    assert "cannot be written" in output
    assert "check its address and keys" in output
    assert not (tmp_path / "runs" / "tune" / "keyless" / "search.json").exists()
