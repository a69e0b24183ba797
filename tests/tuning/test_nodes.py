"""Placement of trials on a cluster's nodes, and the reason why a search waits; real nodes: test_spanning_slow.py."""

from dataclasses import replace
from itertools import combinations, product
from types import SimpleNamespace
from typing import Any

import pytest

from certizoo import UserError
from certizoo.config.compose import compose_config
from tuning import __main__ as tune
from tuning import spaces
from tuning.live import Board

DEFAULTS = compose_config("tune", [])


@pytest.mark.parametrize(
    ("alive", "wanted", "spanned", "trials"),
    [
        ([{"CPU": 2}, {"CPU": 2}], {"CPU": 3}, 1, 0),  # together they have 4 CPUs
        ([{"CPU": 3}, {"CPU": 3}], {"CPU": 2}, 1, 2),
        ([{"CPU": 8, "GPU": 1}, {"CPU": 8}], {"CPU": 2, "GPU": 1}, 1, 1),
        ([{"CPU": 8, "GPU": 1}, {"CPU": 8}], {"CPU": 2, "GPU": 0}, 1, 8),
        ([{"CPU": 2, "GPU": 1}], {"CPU": 1, "GPU": 0.25}, 1, 2),
        ([{"CPU": 2}], {}, 1, 0),
        ([{"CPU": 8}], {"CPU": 1}, 2, 0),  # a trial cannot span two nodes by shares of one
        ([{"CPU": 8}, {"CPU": 3}], {"CPU": 1}, 2, 3),
        ([{"CPU": 2}, {"CPU": 2}, {"CPU": 2}], {"CPU": 1}, 2, 3),
        ([{"CPU": 2}, {"CPU": 2}, {"CPU": 2}], {"CPU": 1}, 4, 0),
    ],
)
def test_a_trial_takes_its_share_of_so_many_nodes(
    alive: list[dict[str, float]],
    wanted: dict[str, float],
    spanned: int,
    trials: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tuning import nodes  # imported here, because Ray takes seconds

    seen = [{"Resources": node, "Alive": True} for node in alive]
    monkeypatch.setattr(nodes.ray, "nodes", lambda: [*seen, {"Resources": {"CPU": 99, "GPU": 99}, "Alive": False}])
    search: Any = SimpleNamespace(resources=wanted, nodes=spanned, wait=False, max_concurrent=None, num_samples=100)
    if trials:
        assert nodes.at_once(search) == trials
    else:
        with pytest.raises(UserError, match="no trial fits on"):
            nodes.at_once(search)
        search.wait = True  # for nodes that an autoscaler adds
        assert nodes.at_once(search) == 100


def test_as_many_trials_as_can_be_laid_out() -> None:
    """Compare with all ways to place trials on nodes one after the other."""

    def most(shares: tuple[int, ...], nodes: int) -> int:
        ways = (c for c in combinations(range(len(shares)), nodes) if all(shares[i] for i in c))
        return max((1 + most(tuple(s - (i in c) for i, s in enumerate(shares)), nodes) for c in ways), default=0)

    from tuning.nodes import room_on

    for shares in product(range(4), repeat=3):
        for nodes in (1, 2, 3):
            assert room_on(shares, nodes) == most(shares, nodes)


def test_a_search_that_waits_says_why_and_not_too_often(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tuning import driver, nodes

    clock, running = [0.0], SimpleNamespace(status="RUNNING")
    pending = SimpleNamespace(status="PENDING")
    monkeypatch.setattr(driver.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(nodes.ray, "available_resources", lambda: {"CPU": 2.0, "memory": 1e9})
    monkeypatch.setattr(nodes.ray, "nodes", lambda: [{"Alive": True}, {"Alive": True}])
    search: Any = SimpleNamespace(resources={"CPU": 2, "GPU": 1}, nodes=1)
    watch = driver.Watch(Board(spaces.load("msvp"), ["clean_acc"], 2, 1), search)
    said = []
    for second in range(700):
        clock[0] = float(second)
        watch.on_step_end(second, [running if 100 <= second <= 110 else pending])
        if out := capsys.readouterr().out:
            said.append((second, out))
    assert [second for second, _ in said] == [31, 141, 231, 591]
    assert "each needs CPU=2 GPU=1 on one node, and CPU=2 GPU=0 of 2 nodes are free" in said[0][1]


@pytest.mark.parametrize("place", ["gopher://bucket/searches", "/dev/null/searches"])
def test_a_place_that_cannot_be_written_is_one_line(place: str) -> None:
    from tuning import nodes

    with pytest.raises(UserError, match=f"--storage {place} cannot be written"), nodes._marked(place):
        pass


@pytest.mark.parametrize(
    ("said", "node", "reserves", "text"),
    [
        ("warning\n3000", 16000, 6000, "a trial reserves"),  # two ranks
        ("3000", 4000, 4000, "a trial reserves"),  # an estimate refuses no trial
        ("", 16000, None, "is unknown (data.root: no shards)"),
        ("3000", 0, None, ""),  # a node that does not say
    ],
)
def test_a_trial_reserves_what_the_doctor_estimates(
    said: str, node: int, reserves: int | None, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tuning import memory, nodes

    answer = SimpleNamespace(returncode=0 if said else 2, stdout=said, stderr="data.root: no shards\n")
    monkeypatch.setattr(memory.subprocess, "run", lambda *words, **options: answer)
    monkeypatch.setattr(memory.ray, "nodes", lambda: [{"Resources": {"CPU": 8, "memory": node}, "Alive": True}])
    asked = replace(
        tune.new_search(tune.parser(DEFAULTS).parse_args(["--space", "msvp"]), DEFAULTS), resources={"CPU": 2}
    )
    found, line = memory.reserved(asked)
    assert text in line
    assert found.resources.get("memory") == reserves
    assert nodes.at_once(found) == (min(4, node // reserves) if reserves else 4)
    for own in ({"CPU": 2, "memory": 1}, {"GPU": 1}):
        assert memory.reserved(replace(asked, resources=own))[0].resources == own
