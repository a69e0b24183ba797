"""Shards from web servers, object stores and commands: the same samples as from the disk, or one line with a reason."""

import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from certizoo import shards
from certizoo.shards import DataConfig, plan
from certizoo.shards.remote import fetch
from certizoo.shards.sets import listing_of
from tests.tools import remote_shards
from tests.tools.cases import mostly_slow
from tests.tools.remote_shards import SIZE, config, refusal, same, trained
from tests.tools.shard_server import Server, serving

folder = remote_shards.folder  # the fixture


@pytest.fixture
def server(folder: Path, tmp_path: Path) -> Iterator[Server]:
    """Serve a copy, so that a test may change it."""
    shutil.copytree(folder, tmp_path / "served")
    with serving(tmp_path / "served") as server:
        yield server


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "PAUSES", (0, 0))
    monkeypatch.setenv("CERTIZOO_PIPES", f"cat,sh,{sys.executable}")


@pytest.mark.parametrize("workers", mostly_slow((0, 2), 0))
@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("kind", ["http", "file", "pipe"])
def test_training_reads_the_same_batches_from_everywhere(
    kind: str, cached: bool, workers: int, server: Server, folder: Path, tmp_path: Path
) -> None:
    root = {"http": server.url, "file": f"file://{folder}", "pipe": f"pipe:cat {folder}/{{shard}}"}[kind]
    here = config(str(folder), workers=workers, augment="flip_crop")
    there = replace(here, root=root, cache=str(tmp_path / "cache") if cached else None)
    assert same(trained(there), trained(here))
    assert same(trained(there, skip_batches=3), trained(here, skip_batches=3))
    near, far = shards.find(here, "train"), shards.find(there, "train")
    assert (near.counts, near.histogram, near.digest) == (far.counts, far.histogram, far.digest)
    assert listing_of(there).class_names == listing_of(here).class_names != None  # type: ignore[union-attr]  # noqa: E711


@pytest.mark.parametrize("world_size", [1, 3])
def test_evaluation_reads_each_sample_once(server: Server, world_size: int) -> None:
    data = config(server.url)
    found = shards.find(data, "test")
    keys = [
        key
        for rank in range(world_size)
        for names, _, _ in shards.eval_loader(found, data, batch_size=16, rank=rank, world_size=world_size)
        for key in names
    ]
    assert keys == [f"toy-train-{place:08d}" for place in range(90)]


def test_a_manifest_without_labels_is_completed_by_a_walk(server: Server, folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "served" / "toy.json"
    content = json.loads(path.read_text())
    for entry in content["files"]:
        del entry["label_histogram"]
    path.unlink()
    (path.parent / "manifest.json").write_text(json.dumps(content))  # the general name works as well
    assert shards.find(config(server.url), "train").histogram == shards.find(config(str(folder)), "train").histogram


@pytest.fixture
def long(tmp_path: Path) -> Iterator[Server]:
    """Serve two shards of several blocks."""
    images = np.random.default_rng(0).integers(0, 256, (400, SIZE, SIZE, 3), dtype=np.uint8)
    source = [(image, number % 7) for number, image in enumerate(images)]
    shards.write(source, tmp_path / "long", name="toy", split="train", per_shard=200)
    with serving(tmp_path / "long") as server:
        server.ranges = True
        yield server


@pytest.mark.parametrize("kind", ["http", "file"])
def test_a_resumed_epoch_fetches_the_blocks_that_are_left(
    kind: str, long: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "REACH", 10)  # so that the last batches lie in the last block
    near = config(str(tmp_path / "long"))
    far = replace(near, root=long.url if kind == "http" else f"file://{tmp_path}/long")
    size = (tmp_path / "long" / VICTIM).stat().st_size
    for batch in (0, 10, 24):
        assert same(trained(far, skip_batches=batch), trained(near, skip_batches=batch))
    if kind == "http":
        assert 0.7 * size < long.sent < 0.8 * size  # the first whole; blocks 1 to 3; block 3, which has 8 samples
        long.ranges, long.sent = False, 0
        assert same(trained(far, skip_batches=24), trained(near, skip_batches=24))
        assert long.sent == 0


def test_blocks_that_come_wrong_are_refused(long: Server) -> None:
    long.fault = dict.fromkeys((VICTIM, "toy-train-000000.tar"), "bit")
    for verify, word in (("auto", "sha256 of bytes"), ("size", "toy-train")):
        assert word in refusal(lambda verify=verify: trained(config(long.url, verify=verify), skip_batches=24))  # type: ignore[misc]


# --- servers that fail ----------------------------------------------------------------------------------------------

VICTIM = "toy-train-000001.tar"


def evaluate(data: DataConfig) -> int:
    loader = shards.eval_loader(shards.find(data, "test"), data, batch_size=16)
    return sum(len(keys) for keys, _, _ in loader)


WRONG = [
    (*fault, cached)
    for fault in (("cut", VICTIM), ("bit", "sha256"), ("long", "more than"), ("silent", VICTIM))
    for cached in (False, True)
]


@pytest.mark.parametrize(
    ("fault", "word", "cached"), mostly_slow(WRONG, *(case for case in WRONG if case[0] != "silent"))
)
def test_what_comes_wrong_is_asked_for_again_and_then_refused(
    fault: str, word: str, cached: bool, server: Server, tmp_path: Path
) -> None:
    data = config(server.url, timeout=1, cache=str(tmp_path / "cache") if cached else None)
    server.fault[VICTIM] = fault
    start = time.monotonic()
    message = refusal(lambda: evaluate(data))
    assert time.monotonic() - start < 20
    assert VICTIM in message
    assert word in message
    assert server.gets[VICTIM] == (1 if fault == "long" else 3)
    assert not list(tmp_path.glob(f"cache/{VICTIM}*"))
    server.gets.clear()
    server.times = 2  # succeeds at the third attempt
    if fault != "long":
        assert evaluate(data) == 90


def test_without_hashes_only_the_size_is_held(server: Server) -> None:
    server.fault[VICTIM] = "bit"
    data = config(server.url, verify="size")
    assert VICTIM in refusal(lambda: evaluate(data))  # the flipped bit is in a header of the tar
    assert server.gets[VICTIM] == 1  # the length is the announced one


def test_absent_shards_are_refused_before_any_work(server: Server, tmp_path: Path) -> None:
    for root in (server.url, f"file://{tmp_path}/served"):
        assert "holds" in refusal_of(root, lambda path: path.write_bytes(path.read_bytes() + b"\0"), tmp_path)
        assert "missing" in refusal_of(root, lambda path: path.unlink(missing_ok=True), tmp_path)
    assert not any(name.endswith(".tar") and name != VICTIM for name in server.gets)


def refusal_of(root: str, damage: Callable[[Path], object], tmp_path: Path) -> str:
    victim = tmp_path / "served" / VICTIM
    victim.touch()
    damage(victim)
    message = refusal(lambda: shards.find(config(root), "train"))
    assert VICTIM in message
    return message


def test_a_server_that_is_away_or_silent_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:  # accepts connections and never answers
        silent = f"http://127.0.0.1:{listener.getsockname()[1]}/set"
        start = time.monotonic()
        assert silent in refusal(lambda: shards.find(config(silent, timeout=1), "train"))
        assert time.monotonic() - start < 20
    caplog.clear()
    assert silent in refusal(lambda: shards.find(config(silent, timeout=1), "train"))  # no server listens
    assert caplog.text.count("again in") == 2  # the server might come back


def test_no_manifest_and_no_match_say_what_is_sought(server: Server, tmp_path: Path) -> None:
    assert "no shards other-*.tar" in refusal(lambda: shards.find(config(server.url, train="other-*.tar"), "train"))
    (tmp_path / "served" / "toy.json").unlink()
    message = refusal(lambda: shards.find(config(server.url), "train"))
    assert "toy.json" in message
    assert "manifest.json" in message
    assert "certizoo shards index" in message


# --- foreign names lead to no other file, and foreign data stay within their limit -----------------------------------


@pytest.mark.hostile
@pytest.mark.parametrize("name", ["../toy-train-9.tar", "/etc/toy-train-9.tar", "..", "a/../b.tar"])
def test_a_listing_that_leaves_its_folder_is_refused(name: str, server: Server, tmp_path: Path) -> None:
    path = tmp_path / "served" / "toy.json"
    content = json.loads(path.read_text())
    content["files"].append({"file": name, "samples": 1, "bytes": 1})
    path.write_text(json.dumps(content))
    for root in (server.url, str(path.parent), f"pipe:cat {path.parent}/{{shard}}"):
        assert name in refusal(lambda root=root: shards.find(config(root), "train"))  # type: ignore[misc]


@pytest.mark.hostile
@pytest.mark.parametrize("name", ["-rf.tar", "a b.tar", "a%2f.tar", "a?b.tar", "a#b.tar", "$HOME.tar", "a\n.tar", ".a"])
def test_a_listing_with_names_that_mean_something_elsewhere_is_refused(
    name: str, server: Server, tmp_path: Path
) -> None:
    path = tmp_path / "served" / "toy.json"
    content = json.loads(path.read_text())
    content["files"].append({"file": name, "samples": 1, "bytes": 1})
    path.write_text(json.dumps(content))
    assert "not a plain file name" in refusal(lambda: shards.find(config(server.url), "train"))


@pytest.mark.hostile
@pytest.mark.parametrize("change", [{"bytes": -1}, {"bytes": 0}, {"samples": 0}, {"bytes": 10**5000}])
def test_a_listing_with_impossible_numbers_is_refused(change: dict, server: Server, tmp_path: Path) -> None:
    path = tmp_path / "served" / "toy.json"
    content = json.loads(path.read_text())
    content["files"][0] |= change
    sys.set_int_max_str_digits(0)
    text = json.dumps(content)
    sys.set_int_max_str_digits(4300)
    path.write_text(text)
    refusal(lambda: shards.find(config(server.url), "train"))


@pytest.mark.hostile
def test_a_manifest_is_of_bounded_size(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "MAX_MANIFEST_BYTES", 100)
    assert "toy.json is larger" in refusal(lambda: shards.find(config(server.url), "train"))


@pytest.mark.hostile
@pytest.mark.parametrize(
    ("root", "word"),
    [
        ("ftp://host/set", "protocol"),
        ("simplecache::s3://bucket/set", "protocol"),
        ("s3://key:secret@bucket/set", "password"),
        ("https://token@host/set", "password"),
        ("https://host/set?signature=1", "https://HOST_OR_BUCKET/FOLDER"),
        ("s3:///set", "s3://HOST_OR_BUCKET/FOLDER"),
        ("file://set", "absolute"),
        ("pipe:", "{shard}"),
        ("pipe:cat file.tar", "{shard}"),
        ("pipe:cat '{shard}", "quotes"),
        ("pipe:{shard} x", "{shard}"),
        ("pipe:rm -rf {shard}", "CERTIZOO_PIPES=rm"),
        ("pipe:absent-program {shard}", "install it"),
    ],
)
def test_roots_that_cannot_be_are_refused(root: str, word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CERTIZOO_PIPES", "cat,{shard},absent-program")
    message = refusal(lambda: shards.find(config(root), "train"))
    assert word in message
    assert "secret" not in message
    assert "token" not in message


def test_a_library_that_is_absent_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    assert "pip install gcsfs" in refusal(lambda: shards.find(config("gs://bucket/set"), "train"))


def test_no_space_for_a_shard_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    message = refusal(lambda: evaluate(config(f"file://{folder}")))
    assert "TMPDIR" in message
    assert "No space" in message


# --- commands ---------------------------------------------------------------------------------------------------------


@pytest.mark.hostile
def test_a_command_gets_words_and_no_shell(folder: Path, tmp_path: Path) -> None:
    data = config(f"pipe:cat {folder}/{{shard}} ; touch {tmp_path}/evil $(touch {tmp_path}/evil)")
    assert "exit status 1" in refusal(lambda: shards.find(data, "train"))
    assert not (tmp_path / "evil").exists()


def test_a_failing_command_is_quoted(folder: Path) -> None:
    data = config(f"pipe:sh -c 'cat {folder}/$0; case $0 in *.tar) echo no leave >&2; exit 7; esac' {{shard}}")
    message = refusal(lambda: evaluate(data))
    assert "exit status 7: no leave" in message
    assert "toy-train-000000.tar" in message


CLOSED = "import os, time; os.close(1); time.sleep(60)"


@pytest.mark.parametrize("script", mostly_slow(("import time; time.sleep(60)", CLOSED), CLOSED))
def test_a_silent_command_is_ended(script: str, folder: Path, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    code = f"import os; open('{pid}', 'a').write(str(os.getpid()) + '\\n'); {script}"
    data = config(f'pipe:{sys.executable} -c "{code}" {{shard}}', timeout=1)
    start = time.monotonic()
    refusal(lambda: shards.find(data, "train"))
    assert time.monotonic() - start < 30
    for line in pid.read_text().splitlines():
        assert not Path(f"/proc/{line}").exists()


# --- servers that lead elsewhere, and secrets -------------------------------------------------------------------------


@pytest.mark.hostile
@pytest.mark.parametrize(
    "target",
    [
        "http://127.0.0.1:{other}/{name}",  # another port is another host
        "http://localhost:{other}/{name}",
        "http://localhost:{own}/{name}",
        "//localhost:{other}/{name}",
        "http://user:password@127.0.0.1:{other}/{name}",
        "http://[::1]:{other}/{name}",
        "http://169.254.169.254/latest/meta-data",
        "https://127.0.0.1:{own}/{name}",
        "file:///etc/passwd",
        "ftp://127.0.0.1/x",
    ],
)
@pytest.mark.parametrize("name", ["toy.json", "toy-train-000001.tar"])
def test_a_server_cannot_redirect_elsewhere(
    name: str, target: str, server: Server, folder: Path, tmp_path: Path
) -> None:
    with serving(folder) as other:
        ports = {"own": server.server_address[1], "other": other.server_address[1]}
        server.leads[name] = target.format(name=name, **ports)
        assert "lead" in refusal(lambda: shards.find(config(server.url), "train"))
        assert not other.gets
    assert server.gets[name] <= 6


def test_a_server_may_lead_to_another_of_its_own_paths(server: Server, tmp_path: Path) -> None:
    (tmp_path / "served" / "other.json").write_bytes((tmp_path / "served" / "toy.json").read_bytes())
    server.leads["toy.json"] = "/other.json"
    assert shards.find(config(server.url), "train").samples == 90


@pytest.mark.hostile
def test_a_server_that_leads_in_circles_is_one_line(server: Server) -> None:
    server.leads["toy.json"] = "/toy.json"
    assert "toy.json" in refusal(lambda: shards.find(config(server.url), "train"))


@pytest.mark.hostile
@pytest.mark.parametrize("allowed", [None, "", "other.host", "127.0.0.1.evil", "*"])
def test_secrets_of_netrc_are_not_sent_by_default(
    allowed: str | None, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(tmp_path, monkeypatch, allowed)
    assert shards.find(config(server.url), "train").samples == 90
    assert server.secrets == []


def test_the_secrets_of_netrc_go_to_hosts_that_the_person_names(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(tmp_path, monkeypatch, "example.org,127.0.0.1")
    assert shards.find(config(server.url), "train").samples == 90
    assert set(server.secrets) == {"Basic bWU6c2VjcmV0"}  # me:secret


def plant(home: Path, monkeypatch: pytest.MonkeyPatch, allowed: str | None) -> None:
    (home / "netrc").write_text("machine 127.0.0.1 login me password secret\ndefault login me password secret\n")
    (home / "netrc").chmod(0o600)
    monkeypatch.setenv("NETRC", str(home / "netrc"))
    if allowed is None:
        monkeypatch.delenv("CERTIZOO_NETRC", raising=False)
    else:
        monkeypatch.setenv("CERTIZOO_NETRC", allowed)


@pytest.mark.hostile
@pytest.mark.parametrize("name", ["toy.json", VICTIM])
def test_a_compressed_response_is_not_unpacked(name: str, server: Server) -> None:
    server.fault[name] = "swollen"
    start = time.monotonic()
    assert name in refusal(lambda: evaluate(config(server.url)))
    assert time.monotonic() - start < 20
