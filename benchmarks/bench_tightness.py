"""Tightness of every rule: bound / best value found by gradient ascent, over at least 200 instances of each rule.

Primitives, which tests/zoo/primitives attacks, are left out. First order, radius: published and local rules, on the
same instances. Second order: remainder, beta and the norm of J. Modules, inputs and the search are those of the tests;
a violated bound ends the run with an error. `attacked` are all instances, `compared` those where the search found more
than rounding.

    python -m benchmarks.bench_tightness [--only Mlp SLL]
"""

import argparse
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from timm.models.swin_transformer import SwinTransformerBlock
from torch import Tensor, nn

from benchmarks.record import record
from benchmarks.timing import timed
from tests.tools import attention_cases, attention_variants, curvature_cases, first_order_cases
from tests.tools.expansions import Instance, tightness
from zoo.primitives import PRIMITIVES
from zoo.rules import ModuleRules, affine, types_where

MODULES = 20  # of each case of second order: 200 inputs
Row = dict[str, Any]


def rows_of(kind: type[nn.Module], attacked: dict[str, int], search: Callable[[], dict[str, Tensor]]) -> Iterator[Row]:
    """Iterate over one row per bound that `search` reports; seconds, on one core, are those of all of them."""
    found, spent = timed(search)
    seconds = round(spent, 1)
    for bound, ratio in found.items():
        least, median = (float(f"{value:.4g}") for value in (ratio.min(), ratio.median()))
        counts = {"attacked": attacked[bound], "compared": len(ratio)}
        yield {"rule": kind.__name__, "bound": bound, **counts, "least": least, "median": median, "seconds": seconds}


def first_order(kind: type[nn.Module], name: str) -> Iterator[Row]:
    """Attack ||f(x + G) - f(x)||; skip instances where nothing moves."""
    make, _ = first_order_cases.CASES[kind]
    cases = first_order_cases.instances(
        make, first_order_cases.SHAPES.get(kind, (first_order_cases.N, first_order_cases.D)), seed=0
    )

    def search() -> dict[str, Tensor]:
        reached = first_order_cases.reached(cases, local=name == "local radius")
        if not reached.max() <= 1 + 1e-9:
            raise AssertionError(f"{kind.__name__}: bound beaten by a factor of {reached.max()}")
        return {name: 1 / reached[reached > 0]}

    yield from rows_of(kind, {name: sum(len(x) for _, x, _ in cases)}, search)


def expansions() -> dict[type[nn.Module], list[Instance]]:
    """Return all instances of the second-order tests by the type of their module."""
    sources: list[Iterable[Instance]] = [
        *(curvature_cases.instances(case, 0, MODULES) for cases in curvature_cases.CASES.values() for case in cases),
        *map(attention_cases.mixtures, attention_cases.MIXTURES),
        *map(attention_variants.instances, attention_variants.CASES),
    ]
    kinds: dict[type[nn.Module], list[Instance]] = {}
    for case in (case for source in sources for case in source):
        kinds.setdefault(type(case.module), []).append(case)
    if set(kinds) != set(types(lambda rules: rules.expansion not in (None, affine))):
        raise LookupError("the tests have no instances of some rules of second order")
    return kinds


def second_order(kind: type[nn.Module], cases: list[Instance]) -> Iterator[Row]:
    inputs = sum(len(case.x) for case in cases)
    attacked = {"remainder": sum(case.g.shape[:2].numel() for case in cases), "beta": inputs, "gain": inputs}
    torch.manual_seed(0)  # power iteration starts at random
    yield from rows_of(kind, attacked, lambda: tightness(cases))


def types(where: Callable[[ModuleRules[Any]], object]) -> list[type[nn.Module]]:
    return [kind for kind in types_where(where) if kind not in PRIMITIVES]


def all_rows(wanted: Callable[[type[nn.Module]], bool]) -> Iterator[Row]:
    for kind in filter(wanted, types(lambda rules: rules.rule or rules.chain)):
        yield from first_order(kind, "radius")
    windows = SwinTransformerBlock  # its local rule is that of its windows
    for kind in filter(wanted, (*types(lambda rules: rules.local), windows)):
        yield from first_order(kind, "local radius")
    for kind, cases in expansions().items():
        if wanted(kind):
            yield from second_order(kind, cases)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", metavar="TYPE", help="module types to measure, without writing the results (default: all)"
    )
    only = parser.parse_args().only
    rows = list(all_rows(lambda kind: not only or kind.__name__ in only))
    columns = ("rule", "bound", "attacked", "compared", "least", "median", "seconds")
    table = Table(*columns, box=None, pad_edge=False, collapse_padding=True)  # all in 80 characters
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    Console().print(table)
    if not only:
        record("tightness", {"ratio": "bound / best found", "rows": rows})


if __name__ == "__main__":
    main()
