"""Search hyperparameters with Ray Tune. Every trial runs the real trainer, is certified, and goes to the registry.

    python tune.py --space msvp                               on this machine, on the digits set
    ray submit cluster/ray.yaml tune.py --space msvp          on a cluster (cluster/README.md)
    python tune.py --space msvp -- +model=lofast_vit_c10 data=cifar10 data.root=SHARDS train.epochs=5
    python tune.py --resume                                   finish a search that was interrupted or killed

The search ends with an HTML page of all trials.
"""

import argparse
import shlex
import sys
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from certizoo import UserError
from certizoo.config.compose import compose_config
from certizoo.config.schema import Count, Positive, Source, Whole, argument, checked
from certizoo.errors import one_line_errors
from certizoo.files import disk_errors, require_file_name
from certizoo.locks import sole_writer
from certizoo.ports import ray_address
from certizoo.registry.server import credentials, store
from tuning import objectives, search, spaces
from tuning.search import Search

INTERRUPTED = 130  # the shell's exit status for Ctrl-C


def parser(defaults: dict[str, Any]) -> argparse.ArgumentParser:
    """Return the parser; defaults come from configs/tune.yaml."""
    top = argparse.ArgumentParser(
        prog="tune.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Anything after -- goes to the trainer as Hydra overrides: python tune.py --space l2 -- train.epochs=30",
    )  # fmt: skip
    add = top.add_argument
    add("--space", metavar="NAME", help=f"search space: {', '.join(spaces.names())}")
    add("--num-samples", type=argument(Count), metavar="N", help="trials (default: %(default)s)")
    add(
        "--max-concurrent",
        type=argument(Count),
        metavar="N",
        help="concurrent trials (default: as many as the resources allow)",
    )
    add("--resources-per-trial", type=_resources, metavar="CPU=N,GPU=N",
        help="one rank per GPU, or per CPU without GPUs (default: CPU=1)")  # fmt: skip
    add("--nodes-per-trial", type=argument(Count), metavar="N",
        help="nodes on each of which a trial takes --resources-per-trial (default: %(default)s)")  # fmt: skip
    add("--wait", action="store_true", help="start even if no node fits a trial yet: an autoscaler adds nodes")
    add("--metric", action="append", metavar="NAME[@EPS]", help="certified_acc@EPS, pgd_acc@EPS or clean_acc; "
        f"repeat it for a Pareto front (default: {' '.join(defaults['metric'])})")  # fmt: skip
    add("--scheduler", choices=("asha", "pbt", "none"), help="early stopping (default: %(default)s)")
    add("--search", choices=("optuna", "random"), help="search algorithm (default: optuna; random with pbt)")
    add("--seed", type=argument(Whole), help="seed of the search algorithm (default: %(default)s)")
    add(
        "--max-failures",
        type=argument(Whole),
        metavar="N",
        help="restarts of a trial that lost its worker (default: %(default)s)",
    )
    add("--storage", type=argument(Source), metavar="FOLDER|URL",
        help="folder for searches that all nodes see (default: %(default)s), "
        "or s3://BUCKET/FOLDER for checkpoints and results, with local disks on the nodes")  # fmt: skip
    add("--name", help="name of the search (default: the space and the time)")
    add("--trainer", choices=("adv_train", "std_train", "constrain"), help="trainers/NAME.py (default: the space's)")
    add(
        "--resume",
        nargs="?",
        const="",
        metavar="NAME",
        help="finish this search, or the newest, with its original options",
    )
    add("overrides", nargs="*", metavar="-- KEY=VALUE", help="Hydra overrides for the trainer")
    top.set_defaults(**{key: value for key, value in defaults.items() if key not in ("metric", "resources_per_trial")})
    return top


def new_search(args: argparse.Namespace, defaults: dict[str, Any]) -> Search:
    """Return the requested search after checking its space, objectives and the trial's configuration."""
    if args.space is None:
        raise UserError(f"no space given; add --space NAME, one of {', '.join(spaces.names())}")
    space, metric = spaces.load(args.space), tuple(args.metric or defaults["metric"])
    proposer = args.search or ("random" if args.scheduler == "pbt" else "optuna")
    if args.scheduler == "pbt" and proposer == "optuna":
        raise UserError("--scheduler pbt chooses its own trials; remove --search")
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
    """Return (the absolute folder of all searches, the object store used instead or '')."""
    if "://" not in args.storage:
        return Path(args.storage).absolute(), ""
    if any(word in args.storage for word in ("access_key", "secret_key", "@")):
        raise UserError("--storage contains a key, which others could read; set keys in the environment")
    return Path(compose_config("tune", [])["storage"]).expanduser().absolute(), args.storage


def old_search(args: argparse.Namespace) -> Search:
    """Return the search to resume, with its original options."""
    storage, _ = storage_of(args)
    return search.load(storage / args.resume if args.resume else search.newest(storage))


def main_search(args: argparse.Namespace, defaults: dict[str, Any]) -> int:
    """Run the search, alone in its folder, and return the exit status.

    The status is 1 if a trial failed or none was certified, 130 after an interruption.
    """
    resume = args.resume is not None
    asked = old_search(args) if resume else new_search(args, defaults)
    with sole_writer(asked.folder, "this search", "start another one with --space and another --name"):
        if not resume and search.begun(asked.folder):
            raise UserError(
                f"{asked.folder} exists; finish that search with --resume {asked.name}, or choose another --name"
            )
        return run(asked, resume)


def run(asked: Search, resume: bool) -> int:
    """Run all trials and write the page at the end."""
    address = ray_address()
    # After the checks that need no large imports: Ray takes seconds.
    from tuning import closing, driver, memory, nodes, server
    from tuning.live import Board, failures

    asked = search.find_data(asked)
    driver.scheduler(asked)  # refuses what pbt cannot do before anything is written
    with driver.cluster(address) as machines:
        asked, reserving = memory.reserved(asked)
        at_once = nodes.at_once(asked)
        with disk_errors("free some space there, then start again"):
            nodes.require_shared(asked)
            asked.save()
        with server.registry(machines, at_once, asked.folder / "registry.log") as uri:
            say(f"search {asked.name}: {asked.num_samples} trials, {at_once} concurrent; registry {store.public(uri)}")
            if reserving:
                say(reserving)
            board = Board(
                asked.parameters, [objective.key for objective in asked.shown], asked.num_samples, asked.epochs
            )
            with board:
                driver.run(asked, driver.Surroundings(credentials.environment(uri), uuid.uuid4().hex), board, resume)
    waiting = server.settle(asked, store.resolve_uri())
    with disk_errors(f"free some space there; `python tune.py --resume {asked.name}` writes it again"):
        page = closing.write(asked, board)
    if not board.console.is_terminal:  # on a terminal the live table is already there
        board.console.print(board.table())
    for line in failures(board, asked.folder / "trials"):
        say(line)
    sort = asked.metric[0].replace("@", ".")
    if left := asked.num_samples - board.ended_trials:
        say(f"interrupted with {left} of {asked.num_samples} trials to go; continue with: {resuming(asked)}")
    say(f"page: {page}\nbrowse: certizoo registry list --sort {sort} --where search={asked.name}")
    if waiting:
        folders = " ".join(map(str, waiting))
        say(f"MLflow does not answer; send {len(waiting)} trials later: certizoo registry sync {folders}")
    return INTERRUPTED if left else int(board.count("failed") > 0 or board.count("certified") == 0)


def resuming(asked: Search) -> str:
    """Return the command that resumes a search."""
    usual = asked.storage == str(storage_of(parser(compose_config("tune", [])).parse_args([]))[0])
    where = "" if usual else f" --storage {shlex.quote(asked.storage)}"
    return f"python tune.py --resume {shlex.quote(asked.name)}{where}"


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _resources(text: str) -> dict[str, float]:
    """Parse 'CPU=2,GPU=1' into Ray's form."""
    try:
        found = {key: checked(key, value, Positive) for key, value in (part.split("=") for part in text.split(","))}
    except (ValueError, UserError):
        raise argparse.ArgumentTypeError(f"{text!r} is invalid; write CPU=2 or CPU=4,GPU=1") from None
    return found if "CPU" in found else {"CPU": 1.0, **found}


@one_line_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    defaults = compose_config("tune", [])
    return main_search(parser(defaults).parse_args(argv), defaults)


if __name__ == "__main__":
    sys.exit(main())
