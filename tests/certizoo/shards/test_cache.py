"""The cache fetches a shard once, keeps its size limit, evicts the least recently opened, and disturbs no reader."""

import errno
import multiprocessing
import os
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest

from certizoo import UserError, shards
from certizoo.locks import locked
from certizoo.shards import DataConfig
from certizoo.shards.remote.cache import Cache
from tests.tools.cases import mostly_slow
from tests.tools.shard_server import Server, serving

FRESH = multiprocessing.get_context("forkserver")  # a fork would inherit this process's locks, held for ever


def content(name: str, size: int) -> bytes:
    return random.Random(name).randbytes(size)


def get(cache: Cache, name: str, size: int = 1000, fetched: list[str] | None = None) -> BinaryIO:
    def fill(file: BinaryIO) -> None:
        if fetched is not None:
            fetched.append(name)
        file.write(content(name, size))

    file = cache.open(name, size, fill)
    assert file.read() == content(name, size)
    file.seek(0)
    return file


def names(folder: Path) -> set[str]:
    return {path.name.removesuffix(".cached") for path in folder.iterdir() if path.is_file()}


def used(folder: Path) -> int:
    total = 0
    for path in folder.iterdir():
        if path.is_file():
            try:
                total += path.stat().st_size
            except FileNotFoundError:
                continue
    return total


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "deep" / "cache", 3500)


def test_what_is_here_is_not_fetched_again(cache: Cache) -> None:
    fetched: list[str] = []
    for name in "aabab":
        get(cache, name, fetched=fetched).close()
    assert fetched == ["a", "b"]
    (cache.folder / "a.cached").write_bytes(b"short")
    get(cache, "a", fetched=fetched)
    assert fetched == ["a", "b", "a"]


def test_the_least_recently_opened_goes_and_the_bound_holds(cache: Cache) -> None:
    for name in "abc":
        get(cache, name).close()
    get(cache, "a").close()
    for name, left in (("d", "acd"), ("e", "ade"), ("a", "ade"), ("f", "aef")):
        get(cache, name).close()
        assert names(cache.folder) == set(left)
        assert used(cache.folder) <= cache.limit


def test_a_file_that_goes_while_it_is_read_is_read_to_its_end(cache: Cache) -> None:
    file = get(cache, "a")
    for name in "bcde":
        get(cache, name).close()
    assert "a" not in names(cache.folder)
    assert file.read() == content("a", 1000)


def test_files_of_others_stay(cache: Cache) -> None:
    cache.folder.mkdir(parents=True)
    (cache.folder / "mine.tar").write_bytes(bytes(5000))
    for name in "abcde":
        get(cache, name).close()
    assert "mine.tar" in names(cache.folder)


def test_an_abandoned_half_goes_and_one_that_is_written_stays(cache: Cache) -> None:
    get(cache, "a").close()
    for name in ("dead", "live"):
        (cache.folder / f"{name}.cached.part").write_bytes(bytes(1000))
        (cache.folder / ".locks" / f"{name}.cached").touch()
    held, over = FRESH.Event(), FRESH.Event()
    writer = FRESH.Process(target=hold, args=(cache.folder / ".locks" / "live.cached", held, over))
    writer.start()
    assert held.wait(20)
    get(cache, "b").close()
    assert names(cache.folder) == {"a", "b", "live.cached.part"}
    get(cache, "c").close()
    assert names(cache.folder) == {"b", "c", "live.cached.part"}  # the half that came counts
    over.set()
    writer.join(20)


def hold(path: Path, held: Any, over: Any) -> None:
    with locked(path):
        held.set()
        over.wait(20)


def test_a_failure_leaves_nothing(cache: Cache) -> None:
    def fail(file: BinaryIO) -> None:
        file.write(b"half")
        raise UserError("the server is away; see to it")

    with pytest.raises(UserError, match="server is away"):
        cache.open("a", 1000, fail)
    assert names(cache.folder) == set()
    get(cache, "a")


def test_a_full_disk_first_costs_old_files_and_then_is_one_line(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    reserve = os.posix_fallocate
    disk = 2500

    def small(fd: int, offset: int, length: int) -> None:
        if used(cache.folder) + length > disk:
            raise OSError(errno.ENOSPC, "No space left on device")
        reserve(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", small)
    for name in "abc":
        get(cache, name).close()
    assert names(cache.folder) == {"b", "c"}
    disk = 500
    with pytest.raises(UserError, match=r"No space left.*; free space.*data\.cache=null"):
        get(cache, "d")
    assert not list(cache.folder.glob("*.part"))


def test_a_folder_that_cannot_be_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"data\.cache=.*cannot be used.*;"):
        get(Cache(tmp_path / "file" / "cache", 3500), "a")


def reader(folder: Path, log: Path, seed: int) -> None:
    """Open files of the small cache in its own order, and record each fetch."""
    cache, draw = Cache(folder, 3500), random.Random(seed)
    for _ in range(60):
        fetched: list[str] = []
        get(cache, draw.choice("abcdef"), fetched=fetched).close()
        with log.open("a") as file:
            file.write("".join(fetched))


@pytest.mark.slow
def test_processes_share_a_small_cache_within_its_bound(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    readers = [FRESH.Process(target=reader, args=(tmp_path / "cache", tmp_path / "log", seed)) for seed in range(3)]
    for process in readers:
        process.start()
    cache, largest = Cache(tmp_path / "cache", 3500), 0
    while any(process.is_alive() for process in readers):
        with locked(cache._lock("room")):  # no process reserves, renames or evicts
            largest = max(largest, used(cache.folder))
        time.sleep(0.001)
    assert [process.exitcode for process in readers] == [0] * 3
    assert largest <= 3500  # three concurrent fetches fit
    assert 2000 <= used(cache.folder) <= 3500


def slow_reader(folder: Path, log: Path) -> None:
    """Open a file that arrives slowly, and write one letter for each fetch."""

    def fill(file: BinaryIO) -> None:
        with log.open("a") as letters:
            letters.write("x")
        time.sleep(0.3)
        file.write(content("a", 1000))

    assert Cache(folder, 3500).open("a", 1000, fill).read() == content("a", 1000)


@pytest.mark.parametrize("count", mostly_slow((2, 4), 2))
def test_processes_that_want_the_same_file_fetch_it_once(count: int, tmp_path: Path) -> None:
    readers = [FRESH.Process(target=slow_reader, args=(tmp_path / "cache", tmp_path / "log")) for _ in range(count)]
    for process in readers:
        process.start()
    for process in readers:
        process.join(30)
    assert [process.exitcode for process in readers] == [0] * count
    assert (tmp_path / "log").read_text() == "x"


# --- under the loaders ----------------------------------------------------------------------------------------------


def written(root: Path, seed: int = 0) -> Path:
    images = np.random.default_rng(seed).integers(0, 256, (60, 8, 8, 3), dtype=np.uint8)
    shards.write(
        [(image, number % 7) for number, image in enumerate(images)], root, name="toy", split="train", per_shard=20
    )
    return root


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with serving(written(tmp_path / "served")) as server:
        yield server


def config(root: str, cache: Path, **changes: object) -> DataConfig:
    base = DataConfig("toy", root, "toy-train-*.tar", "toy-*.tar", 7, 8, cache=str(cache), timeout=5)
    return replace(base, **changes)  # type: ignore[arg-type]


def epoch(data: DataConfig, number: int) -> list[list[int]]:
    found = shards.find(data, "train")
    return [
        [int(label) for label in labels]
        for rank in range(2)
        for _, labels in shards.train_loader(found, data, batch_size=5, epoch=number, seed=0, rank=rank, world_size=2)
    ]


def test_workers_and_ranks_fetch_each_shard_once_for_all_epochs(server: Server, tmp_path: Path) -> None:
    data = config(server.url, tmp_path / "cache", workers=2)
    server.delay = 0.3  # long enough for the other worker to request the same shard
    assert [epoch(data, number) for number in range(2)] == [
        epoch(replace(data, root=str(tmp_path / "served"), cache=None), number) for number in range(2)
    ]
    tars = {name: count for name, count in server.gets.items() if name.endswith(".tar")}
    assert tars == {f"toy-train-{number:06d}.tar": 1 for number in range(3)}


def test_a_folder_is_cached_too_and_sets_of_one_name_are_kept_apart(tmp_path: Path) -> None:
    roots = [written(tmp_path / name, seed) for seed, name in enumerate(("one", "two words?"))]
    data = [config(str(root), tmp_path / "cache") for root in roots]
    firsts = [next(iter(shards.eval_loader(shards.find(d, "test"), d, batch_size=60)))[1] for d in data]
    plain = [replace(d, cache=None) for d in data]
    known = [next(iter(shards.eval_loader(shards.find(d, "test"), d, batch_size=60)))[1] for d in plain]
    assert all((first == image).all() for first, image in zip(firsts, known, strict=True))
    assert len(names(tmp_path / "cache")) == 6


def test_a_bound_below_one_shard_is_refused_before_any_work(server: Server, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"larger than data\.cache_gb=1e-06; use more"):
        shards.find(config(server.url, tmp_path / "cache", cache_gb=1e-6), "train")


@pytest.mark.parametrize("wrong", [{"cache_gb": 0}, {"cache_gb": -1.5}, {"cache_gb": float("nan")}, {"timeout": 0}])
def test_bounds_that_are_none_are_refused(wrong: dict[str, float], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{next(iter(wrong))}"):
        config("anywhere", tmp_path, **wrong)


@pytest.mark.hostile
@pytest.mark.parametrize("how", ["label", "zeros", "link", "fifo", "short"])
def test_a_changed_file_in_the_cache_is_fetched_again(
    how: str, server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = config(server.url, tmp_path / "cache", verify="sha256")
    right = epoch(data, 0)
    victim = sorted((tmp_path / "cache").glob("*.cached"))[0]
    content = victim.read_bytes()
    victim.unlink()
    place = content.index(b".cls")
    changed = content[: place - place % 512 + 512] + b"6" + content[place - place % 512 + 513 :]
    (tmp_path / "elsewhere").write_bytes(changed)
    {
        "label": lambda: victim.write_bytes(changed),
        "zeros": lambda: victim.write_bytes(bytes(len(content))),
        "link": lambda: victim.symlink_to(tmp_path / "elsewhere"),
        "fifo": lambda: os.mkfifo(victim),
        "short": lambda: victim.write_bytes(b"short"),
    }[how]()
    assert epoch(data, 0) == right
    assert victim.read_bytes() == content
    assert not victim.is_symlink()
    assert caplog.text.count("fetching it again") == 1


@pytest.mark.hostile
@pytest.mark.parametrize("mode", [0o775, 0o777, 0o1777])
def test_a_folder_that_others_write_is_used_only_with_hashes(mode: int, server: Server, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(mode)
    with pytest.raises(UserError, match="others may write"):
        epoch(config(server.url, tmp_path / "cache"), 0)
    assert epoch(config(server.url, tmp_path / "cache", verify="sha256"), 0)


@pytest.mark.hostile
def test_a_link_in_place_of_a_partial_file_is_not_followed(cache: Cache, tmp_path: Path) -> None:
    get(cache, "b").close()
    (tmp_path / "mine").write_bytes(b"mine")
    (cache.folder / "a.cached.part").symlink_to(tmp_path / "mine")
    get(cache, "a").close()
    assert (tmp_path / "mine").read_bytes() == b"mine"
