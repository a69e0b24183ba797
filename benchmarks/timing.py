"""Seconds of a call, and of two calls that alternate, so that a machine whose speed drifts slows both."""

import resource
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

Clock = Callable[[], float]
Way = Callable[[], object]
Pair = tuple[float, float]  # seconds
T = TypeVar("T")


def clock_of(device: torch.device) -> Clock:
    """Return the processor time of this process on a CPU, where other programs do not count, else wall time."""
    return time.process_time if device.type == "cpu" else time.perf_counter


def processor_seconds(*whose: int) -> float:
    """Return the processor seconds so far of resource.RUSAGE_SELF, RUSAGE_CHILDREN (those that ended) or both."""
    return sum(used.ru_utime + used.ru_stime for used in map(resource.getrusage, whose))


def timed(call: Callable[[], T], clock: Clock = time.process_time) -> tuple[T, float]:
    """Return the call's value and its seconds, after which the queue of a GPU that this process uses is empty."""
    start = clock()
    value = call()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return value, clock() - start


def pair(first: Way, second: Way, clock: Clock, swap: bool) -> Pair:
    """Return the seconds of both calls, the second of which runs first if `swap`."""
    if swap:
        return pair(second, first, clock, swap=False)[::-1]
    return timed(first, clock)[1], timed(second, clock)[1]


def pairs(first: Way, second: Way, count: int, clock: Clock = time.process_time, swap: bool = True) -> list[Pair]:
    """Return the seconds of both calls, `count` times after a warm-up; `swap`: every other turn in reverse order."""
    return [pair(first, second, clock, swap and turn % 2 == 1) for turn in range(count + 1)][1:]


def ratio_of(found: Sequence[Pair]) -> dict[str, object]:
    """Return median and quartiles of first / second over the pairs, as records name them."""
    ratios = sorted(first / second for first, second in found)
    quarter = len(ratios) // 4
    return {"ratio_median": statistics.median(ratios), "ratio_quartiles": [ratios[quarter], ratios[-1 - quarter]]}
