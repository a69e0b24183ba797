"""Search with Ray Tune; every trial is the real trainer, is certified at its end and goes to the registry.

python tune.py --space msvp                               on this machine, on the digits set
ray submit cluster/ray.yaml tune.py --space msvp          on a cluster (cluster/README.md)
python tune.py --space msvp -- +model=lofast_vit_c10 data=cifar10 data.root=SHARDS train.epochs=5
python tune.py --resume                                   finish a search that was interrupted or killed
"""

import argparse
import os
import shlex
import sys
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

if "CERTIZOO_HOME" in os.environ:  # `ray submit` copies this file to the home folder and runs it there
    os.chdir(os.environ["CERTIZOO_HOME"])
    sys.path.insert(0, os.getcwd())

from certizoo import UserError
from certizoo.compose import compose_config
from certizoo.errors import one_line_errors
from certizoo.files import disk_errors, require_file_name
from certizoo.locks import sole_writer
from registry import credentials, store
from tuning import objectives, search, spaces
from tuning.search import Search

INTERRUPTED = 130  # as a shell says of Ctrl-C


def parser(defaults: dict[str, Any]) -> argparse.ArgumentParser:
    """The options; their defaults are configs/tune.yaml."""
    top = argparse.ArgumentParser(
        prog="tune.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Anything after -- goes to the trainer, in Hydra's words: python tune.py --space l2 -- train.epochs=30",
    )  # fmt: skip
    add = top.add_argument
    add("--space", metavar="NAME", help=f"what is searched: {', '.join(spaces.names())}")
    add("--num-samples", type=_whole, metavar="N", help="trials (default: %(default)s)")
    add("--max-concurrent", type=_whole, metavar="N", help="trials at once (default: as many as the resources take)")
    add("--resources-per-trial", type=_resources, metavar="CPU=N,GPU=N",
        help="one rank for each GPU, without GPUs for each CPU (default: CPU=1)")  # fmt: skip
    add("--nodes-per-trial", type=_whole, metavar="N",
        help="each trial takes --resources-per-trial on so many nodes (default: %(default)s)")  # fmt: skip
    add("--wait", action="store_true", help="begin though no node has room for a trial: an autoscaler brings some")
    add("--metric", action="append", metavar="NAME[@EPS]", help="certified_acc@EPS, pgd_acc@EPS or clean_acc; given "
        f"several times: a Pareto front (default: {' '.join(defaults['metric'])})")  # fmt: skip
    add("--scheduler", choices=("asha", "pbt", "none"), help="early stopping (default: %(default)s)")
    add("--search", choices=("optuna", "random"), help="who proposes (default: optuna; random with pbt)")
    add("--seed", type=int, help="of the proposals (default: %(default)s)")
    add("--max-failures", type=int, metavar="N", help="restarts of a trial that lost its worker (default: %(default)s)")
    add("--storage", metavar="FOLDER|URL", help="seen by all nodes; a search's folder is in it (default: %(default)s). "
        "s3://BUCKET/FOLDER: checkpoints and results go there, and each node needs only its own disk")  # fmt: skip
    add("--name", help="of the search (default: the space and the time)")
    add("--trainer", choices=("adv_train", "std_train", "constrain"), help="trainers/NAME.py (default: the space's)")
    add("--resume", nargs="?", const="", metavar="NAME", help="finish this search, or the newest, as it was begun")
    add("overrides", nargs="*", metavar="-- KEY=VALUE", help="Hydra overrides for the trainer")
    top.set_defaults(**{key: value for key, value in defaults.items() if key not in ("metric", "resources_per_trial")})
    return top


def new_search(args: argparse.Namespace, defaults: dict[str, Any]) -> Search:
    """A search as asked for, checked: space, objectives, the trial's configuration."""
    if args.space is None:
        raise UserError(f"no space given; add --space NAME, one of {', '.join(spaces.names())}")
    space, metric = spaces.load(args.space), tuple(args.metric or defaults["metric"])
    proposer = args.search or ("random" if args.scheduler == "pbt" else "optuna")
    if args.scheduler == "pbt" and proposer == "optuna":
        raise UserError("--scheduler pbt proposes by itself; leave --search away")
    trainer = args.trainer or space.trainer
    overrides, epochs = search.fixed_overrides(space, metric, args.overrides, trainer)
    name = args.name or f"{space.name}-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    require_file_name(f"{name}-0001", "--name (of a trial)")
    storage, store_url = storage_of(args)
    return Search(
        name=name,
        space=space.name,
        storage=str(storage),
        overrides=tuple(overrides),
        metric=tuple(objectives.parse(text).key for text in metric),
        num_samples=args.num_samples,
        max_concurrent=args.max_concurrent,
        resources=args.resources_per_trial or defaults["resources_per_trial"],
        scheduler=args.scheduler,
        search=proposer,
        seed=args.seed,
        max_failures=args.max_failures,
        trainer=trainer,
        epochs=epochs,
        nodes=args.nodes_per_trial,
        wait=args.wait,
        store=store_url,
    )


def storage_of(args: argparse.Namespace) -> tuple[Path, str]:
    """(the folder of all searches, as it reads from every folder; the object store in its place, or '')."""
    if "://" not in args.storage:
        return Path(args.storage).expanduser().absolute(), ""
    if any(word in args.storage for word in ("access_key", "secret_key", "@")):
        raise UserError("--storage names a key, which others would read; keys belong into the environment")
    return Path(compose_config("tune", [])["storage"]).expanduser().absolute(), args.storage


def old_search(args: argparse.Namespace) -> Search:
    """The search to resume, with the options that it was begun with."""
    storage, _ = storage_of(args)
    return search.load(storage / args.resume if args.resume else search.newest(storage))


def main_search(args: argparse.Namespace, defaults: dict[str, Any]) -> int:
    """Run it, alone in its folder; returns the exit status: 1 where a trial failed or none was certified, 130 where
    somebody interrupted it."""
    resume = args.resume is not None
    asked = old_search(args) if resume else new_search(args, defaults)
    with sole_writer(asked.folder, "this search", "begin another by --space and another --name"):
        if not resume and search.begun(asked.folder):
            raise UserError(
                f"{asked.folder} exists; finish that search by --resume {asked.name}, or choose another --name"
            )
        return run(asked, resume)


def run(asked: Search, resume: bool) -> int:
    """From the first to the last trial, and the page at the end."""
    from tuning import closing, driver, nodes, server  # after the cheap errors: Ray takes seconds
    from tuning.live import Board, failures

    asked = search.find_data(asked)
    driver.scheduler(asked)  # refuses what pbt cannot do before anything is written
    with driver.cluster() as machines:
        at_once = nodes.at_once(asked)
        with disk_errors("free some space there, then start again"):
            nodes.require_shared(asked)
            asked.save()
        with server.registry(machines, at_once, asked.folder / "registry.log") as uri:
            say(f"search {asked.name}: {asked.num_samples} trials, {at_once} at once; registry {store.public(uri)}")
            board = Board(
                asked.parameters, [objective.key for objective in asked.shown], asked.num_samples, asked.epochs
            )
            with board:
                driver.run(asked, driver.Surroundings(credentials.environment(uri), uuid.uuid4().hex), board, resume)
    waiting = server.send_what_waits(asked.folder / "trials", store.resolve_uri())
    with disk_errors(f"free some space there; `python tune.py --resume {asked.name}` writes it again"):
        page = closing.write(asked, board)
    if not board.console.is_terminal:  # there the live table stands already
        board.console.print(board.table())
    for line in failures(board, asked.folder / "trials"):
        say(line)
    sort = asked.metric[0].replace("@", ".")
    if left := asked.num_samples - board.ended_trials:
        say(f"interrupted with {left} of {asked.num_samples} trials to go; continue with: {resuming(asked)}")
    say(f"page: {page}\nbrowse: python -m registry list --sort {sort} --where search={asked.name}")
    if waiting:
        say(f"MLflow is away; send {len(waiting)} trials later: python -m registry sync {' '.join(map(str, waiting))}")
    return INTERRUPTED if left else int(board.count("failed") > 0 or board.count("certified") == 0)


def resuming(asked: Search) -> str:
    """The command that goes on with a search."""
    usual = asked.storage == str(storage_of(parser(compose_config("tune", [])).parse_args([]))[0])
    where = "" if usual else f" --storage {shlex.quote(asked.storage)}"
    return f"python tune.py --resume {shlex.quote(asked.name)}{where}"


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _whole(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number above 0")
    return number


def _resources(text: str) -> dict[str, float]:
    """'CPU=2,GPU=1' as Ray wants it."""
    try:
        found = {key: float(value) for key, value in (part.split("=") for part in text.split(","))}
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: write CPU=2 or CPU=4,GPU=1") from None
    return found if "CPU" in found else {"CPU": 1.0, **found}


@one_line_errors
def main() -> int:
    defaults = compose_config("tune", [])
    return main_search(parser(defaults).parse_args(), defaults)


if __name__ == "__main__":
    sys.exit(main())
