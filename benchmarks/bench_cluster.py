"""Certificates over the nodes of a Ray cluster: seconds of `python -m certify ... on=ray` on 1, 2 and 4 local nodes.

Each node has one CPU. One of 2 nodes is killed in a further run, and one process without Ray is the reference. All rows
must be equal.

    python -m benchmarks.bench_cluster                                # random weights, digits
    python -m benchmarks.bench_cluster --handover RUN/handover --shards FOLDER --images 1000 --method adjoint

A node here is a raylet with one CPU of this machine: nodes beyond its free cores share them and gain nothing. Imports
of Ray's workers are counted, since users wait for them. The time of a whole test set is extrapolated from nodes with a
core each: seconds = start + images * seconds_an_image / nodes, fitted to 1 and 2 nodes.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import pandas as pd

import certizoo.shards.__main__
import zoo
from benchmarks import ray_nodes
from benchmarks.record import record
from certify.stage.run import ROWS, TABLE

NODES = {"one process": 0, "1 node": 1, "2 nodes": 2, "4 nodes": 4, "2 nodes, one killed in the middle": 2}
ONE_RADIUS = ("eps=[0.1]", "headline_eps=0.1", "attack.steps=10", "batch_size=20", "nonce=cluster")
WHOLE = 50_000  # images of ImageNet's validation set


def certified(words: Sequence[str], nodes: int, out: Path, images: int, kill: bool) -> float:
    """Return the seconds of the command on this number of nodes."""
    with ray_nodes.cluster(nodes) if nodes else nullcontext() as started:
        variables = ray_nodes.environment()
        if started:
            variables |= {"RAY_ADDRESS": started.address}
            words = [*words, "on=ray"]
        begin = time.monotonic()
        process = subprocess.Popen([sys.executable, "-m", "certify", *words, f"out={out}"], env=variables)
        while process.poll() is None:
            time.sleep(0.2)
            if started and kill and lines(out / ROWS) >= images // 2:
                os.killpg(started.processes[-1].pid, signal.SIGKILL)
                kill = False
        if process.returncode or kill:
            raise SystemExit(f"certify ended with {process.returncode}, kill still to come: {kill}")
        return time.monotonic() - begin


def of_digits(folder: Path) -> list[str]:
    """Write a hand-over with random weights and the digits; return the command's options for them."""
    model = zoo.model_options("spec_vit_digits") | {"name": "spec_vit_digits"}
    zoo.handover.save(folder / "handover", zoo.create_model(**model), model, {})
    certizoo.shards.__main__.main(["digits", str(folder / "digits")])
    return [f"handover={folder / 'handover'}", "data=digits", f"data.root={folder / 'digits'}"]


def estimated(one: float, two: float, images: int) -> dict[str, float]:
    """Return hours of the whole set by number of nodes, from the seconds of `images` on one and on two nodes."""
    shared = 2 * (one - two)  # seconds that nodes divide among them
    return {str(n): round((one - shared + shared * WHOLE / images / n) / 3600, 2) for n in (1, 2, 4, 8, 64)}


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def main() -> None:
    """Measure, compare, print, and write benchmarks/results/cluster_cpu.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--handover", type=Path, help="hand-over of a CIFAR-10 model")
    parser.add_argument("--shards", type=Path)
    parser.add_argument("--images", type=int, default=360)
    parser.add_argument("--method", default="lofast")
    arguments = parser.parse_args()
    seconds, tables = dict[str, float](), dict[str, pd.DataFrame]()
    with tempfile.TemporaryDirectory() as folder:
        words = [f"method={arguments.method}", f"images={arguments.images}", *ONE_RADIUS]
        if arguments.handover:
            words += [f"handover={arguments.handover}", "data=cifar10", f"data.root={arguments.shards}"]
        else:
            words += of_digits(Path(folder))
        for name, nodes in NODES.items():
            out = Path(folder) / name.replace(" ", "-").replace(",", "")
            seconds[name] = certified(words, nodes, out, arguments.images, "killed" in name)
            tables[name] = pd.read_parquet(out / TABLE).drop(columns=["seconds", "served_difference"])
            print(name, f"{seconds[name]:.0f} s", flush=True)
    for name, table in tables.items():
        pd.testing.assert_frame_equal(table, tables["one process"], rtol=1e-5, obj=name)
    rows = {"method": arguments.method, "images": arguments.images, "seconds": seconds, "rows": "the same"}
    rows |= {"hours_of_50000_images": estimated(seconds["1 node"], seconds["2 nodes"], arguments.images)}
    print(json.dumps(rows))
    record("cluster_cpu", rows)


if __name__ == "__main__":
    main()
