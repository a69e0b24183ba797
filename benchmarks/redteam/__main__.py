"""`python -m benchmarks.redteam`: run the attacks side by side for equal times; see the package."""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.record import RESULTS, circumstances, write
from benchmarks.redteam import lemmas, pairs, scales, weights
from benchmarks.redteam.finding import Finding, Tally

NAME = "redteam"
ATTACKS = {"weights": weights.findings, "pairs": pairs.findings, "lemmas": lemmas.findings, "scales": scales.findings}


def attacked(names: Sequence[str], seed: int, seconds: float) -> Tally:
    """Collect all findings within the time; the next comes from the attack that has used the least time.

    A finding that has begun is waited for.
    """
    tally, spent = Tally(), dict.fromkeys(names, 0.0)
    streams: dict[str, Iterator[Finding]] = {name: ATTACKS[name](seed) for name in names}
    end = time.monotonic() + seconds
    while (start := time.monotonic()) < end:
        name = min(spent, key=lambda one: spent[one])
        tally.add(name, next(streams[name]))
        spent[name] += time.monotonic() - start
    return tally


def show(tally: Tally) -> None:
    table = Table("attack", "case", "tries", "largest ratio", box=None, pad_edge=False)
    for row in tally.rows():
        table.add_row(row["attack"], row["case"], f"{row['tries']:,}", f"{row['ratio']:.6g}")
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, metavar="M", help="run time of all attacks together")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="first seed of the tries")
    parser.add_argument(
        "--only",
        nargs="+",
        default=list(ATTACKS),
        choices=ATTACKS,
        metavar="ATTACK",
        help="attacks to run (default: all)",
    )
    arguments = parser.parse_args()
    tally = attacked(arguments.only, arguments.seed, 60 * arguments.minutes)
    run = {"seed": arguments.seed, "minutes": arguments.minutes, "attacks": arguments.only}
    write(NAME, circumstances() | run | {"rows": tally.rows(), "refuted": tally.refuted})
    show(tally)
    if tally.refuted:
        sys.exit(f"{len(tally.refuted)} claims are false: see 'refuted' in {RESULTS / NAME}.json")


if __name__ == "__main__":
    main()
