"""The driver of Ray Tune (https://docs.ray.io): trials, schedulers, searchers, restart, resume.

A trial reports its evaluations, each with the checkpoint written after it. They contain the objectives on a few images
that the trainer certifies itself; the last report contains those of the certificate. Schedulers compare the first
objective at equal epochs; searchers use all of them.
"""

import logging
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("TUNE_GLOBAL_CHECKPOINT_S", "1")  # otherwise a killed driver loses its last ten seconds
os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's default of 15 leaves a trial only idle time
os.environ.setdefault("RAY_CHDIR_TO_TRIAL_DIR", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")  # the board is our own
os.environ.setdefault("TUNE_FUNCTION_THREAD_TIMEOUT_S", "60")  # a worker ends its last trial before it takes the next
os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")  # TensorBoard files: MLflow has the curves
os.environ.setdefault("TUNE_DISABLE_STRICT_METRIC_CHECKING", "1")  # objectives are known from the first evaluation

import ray
from ray import tune
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, PopulationBasedTraining, TrialScheduler
from ray.tune.search import BasicVariantGenerator, Searcher

from certizoo import UserError
from certizoo.files import write_whole
from tuning import gauges, memory, nodes, objectives
from tuning import trial as training
from tuning.live import Board
from tuning.search import Search
from tuning.spaces import Parameter, Space

WAITING_SECONDS = 30.0  # without a running trial, before the reason is printed
FAILED, REFUSED = "Failed: ", "Refused: "  # the ends of tracebacks: tuning/trial.py
KEPT_OF_A_POPULATION = 8  # checkpoints of a trial: another one may be about to continue from an older one


@dataclass(frozen=True)
class Surroundings:
    """The environment of this session's trials.

    `registry` holds variables by which trials find MLflow; `session` differs between starts.
    """

    registry: Mapping[str, str] = field(repr=False)  # may contain a password
    session: str


@contextmanager
def cluster(address: str | None) -> Iterator[int]:
    """Join the cluster of RAY_ADDRESS or of this machine, or start one; yield the number of nodes.

    `address` is that of certizoo/ports.py.
    """
    quiet = logging.CRITICAL  # otherwise a page of traceback for what the board prints in a line
    ray.init(address, include_dashboard=False, log_to_driver=False, logging_level=quiet, ignore_reinit_error=True)
    try:
        yield sum(node["Alive"] for node in ray.nodes())
    finally:
        ray.shutdown()


def run(search: Search, around: Surroundings, board: Board, resume: bool) -> None:
    """Run all trials to the end of the search, and report each to the board.

    A resumed search keeps its finished trials.
    """
    watch, population = Watch(board, search), search.scheduler == "pbt"
    memory.count_as_lost()
    function = tune.with_parameters(trial, search=search, around=around)
    analysis = tune.run(
        tune.with_resources(function, nodes.resources(search)),
        name=search.name,
        storage_path=search.store or search.storage,
        config={key: domain(parameter) for key, parameter in search.parameters.parameters.items()},
        num_samples=search.num_samples,
        max_concurrent_trials=search.max_concurrent,
        search_alg=searcher(search),
        scheduler=scheduler(search),
        max_failures=search.max_failures,
        checkpoint_config=tune.CheckpointConfig(num_to_keep=KEPT_OF_A_POPULATION if population else 2),
        trial_name_creator=trial_id,
        trial_dirname_creator=trial_id,
        callbacks=[watch],
        reuse_actors=not population,  # this starts in seconds; but a replaced trial would first have to end
        raise_on_failed_trial=False,
        resume="AUTO+ERRORED" if resume else None,
        verbose=0,
    )
    for ended in analysis.trials:  # includes trials of an earlier session
        watch.on_trial_result(0, [], ended, ended.last_result)
        if ended.status == "TERMINATED":
            board.ended(ended.trial_id)


def trial(point: dict[str, Any], search: Search, around: Surroundings) -> None:
    """Run one trial on a worker: train, report, and return the certificate's figures."""
    name = tune.get_context().get_trial_id()
    folder = search.folder / "trials" / name
    refused = folder / f"refused-{around.session}"
    if refused.is_file():  # Tune retries after any failure, but the trainer's own refusal is final
        raise training.Refused(refused.read_text())
    run_dir = folder / f"run-{1 + len(list(folder.glob('run-*.log')))}"
    inner, values = search.certified_run(run_dir), search.parameters.values(point)
    saved = tune.get_checkpoint()
    if saved:
        with saved.as_directory() as kept:
            training.adopt(Path(kept), inner, values)
    overrides = search.trial_overrides(name, point, run_dir)
    command = training.Command(search.script, overrides, search.ranks, around.registry)
    row, known = dict[str, float](), dict[str, float]()  # the last known objectives
    log = run_dir.with_suffix(".log")
    try:
        with nodes.spanned(search, command, log) as (own, others):
            for found in training.train(own, inner, log, others.check):
                gauges.show(search.name, name, training.latest(inner))
                row = found.row | {"epoch": found.row["epoch"] + 1}
                if row["epoch"] < search.epochs:  # the last epoch waits for its certificate
                    known |= objectives.early(search.shown, row) | comparison(search, row)
                    report(row | known, found, inner)
    except training.Refused as refusal:
        with suppress(OSError):  # a full disk costs one more try of a refused trial
            write_whole(refused, str(refusal))
        raise
    certificate = training.certificate(inner)
    last = training.evaluations(inner)[-1]
    figures = {objective.key: objective.value(certificate) for objective in search.shown}
    facts = {"clean_acc": certificate["clean"], "certified": 1, "run_dir": str(inner)}
    row = last | {"epoch": search.epochs} | facts | figures | comparison(search, last)
    ended = training.progress(inner)
    if search.store and ended:  # this node's disk may disappear with the node
        report(row, ended, inner, training.RESULTS)
    else:
        tune.report(row)


def comparison(search: Search, row: dict[str, float]) -> dict[str, float]:
    """Return the figure by which schedulers compare running trials; empty if the trainer certified nothing."""
    value = search.objectives[0].compared(row)
    return {} if value is None else {objectives.COMPARED: value}


def report(row: dict[str, float], found: training.Progress, run_dir: Path, results: Sequence[str] = ()) -> None:
    """Report a row with its checkpoint and these folders of the run.

    The checkpoint is missing if the trainer has already deleted it.
    """
    with tempfile.TemporaryDirectory(dir=run_dir, prefix=".") as scratch:  # the same file system: files are linked
        try:
            kept = training.snapshot(found, run_dir, Path(scratch) / "checkpoint", results)
        except FileNotFoundError:
            tune.report(row)
            return
        tune.report(row, checkpoint=tune.Checkpoint.from_directory(str(kept)))


def domain(parameter: Parameter) -> Any:
    """Return the parameter as a Tune domain of raw values, which `Space.values` interprets."""
    match parameter.kind:
        case "log_uniform":
            return tune.loguniform(parameter.raw_low, parameter.high)
        case "uniform":
            return tune.uniform(parameter.low, parameter.high)
        case "integer":
            return tune.randint(int(parameter.low), int(parameter.high) + 1)
        case _:
            return tune.choice(list(parameter.options))


def searcher(search: Search) -> Searcher | BasicVariantGenerator:
    if search.search == "random":
        return BasicVariantGenerator(random_state=search.seed, max_concurrent=search.max_concurrent or 0)
    from optuna import logging as optuna_logging
    from optuna.samplers import TPESampler
    from ray.tune.search.optuna import OptunaSearch

    optuna_logging.set_verbosity(optuna_logging.ERROR)
    keys = [objective.key for objective in search.objectives]
    sampler = TPESampler(seed=search.seed, n_startup_trials=min(10, max(2, search.num_samples // 3)))
    return OptunaSearch(metric=keys, mode=["max"] * len(keys), sampler=sampler)


def scheduler(search: Search) -> TrialScheduler:
    every = search.compared_every
    compared = {"time_attr": "epoch", "metric": objectives.COMPARED, "mode": "max"}
    match search.scheduler:
        case "asha":
            return ASHAScheduler(**compared, max_t=search.epochs, grace_period=every, reduction_factor=3)
        case "pbt":
            mutations = {key: domain(p) for key, p in mutable(search.parameters).items()}
            # Before the first evaluation there is nothing to compare.
            return PopulationBasedTraining(
                **compared, perturbation_interval=every, require_attrs=False, hyperparam_mutations=mutations
            )
        case _:
            return FIFOScheduler()


def mutable(space: Space) -> dict[str, Parameter]:
    """Return the parameters. None may change the model: weights of one shape fit no other."""
    shapes = [key for key in space.parameters if key.startswith("model.")]
    if shapes:
        raise UserError(f"--scheduler pbt copies weights between trials, but {shapes[0]} changes the model; use asha")
    return dict(space.parameters)


def trial_id(trial: Any) -> str:
    return str(trial.trial_id)


class Watch(tune.Callback):
    """A callback that passes Tune's events to the board and reports when nothing runs."""

    def __init__(self, board: Board, search: Search) -> None:
        self.board, self.search = board, search
        self._since, self._patience = time.monotonic(), WAITING_SECONDS

    def on_step_end(self, iteration: int, trials: list[Any], **info: Any) -> None:
        """Report progress to a log, and, less and less often, that no trial has run for a while."""
        now = time.monotonic()
        self.board.alive()
        if not trials or any(trial.status == "RUNNING" for trial in trials):
            self._since, self._patience = now, WAITING_SECONDS
        elif now - self._since > self._patience:
            self._patience *= 4
            self.board.waiting(nodes.waiting_for(self.search))

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self.board.started(trial.trial_id, trial.config)

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        self.board.reported(trial.trial_id, trial.config, result)

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self.board.ended(trial.trial_id)

    def on_trial_recover(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        said = last_failure(trial)
        if REFUSED not in said:  # a refused trial fails in a moment: retrying changes nothing
            self.board.restarting(trial.trial_id, trial.config, self._reason(said, trials, trial))

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self.board.failed(trial.trial_id, trial.config, self._reason(last_failure(trial), trials, trial))

    def _reason(self, said: str, trials: list[Any], ended: Any) -> str:
        """Return the trainer's own words, or the last line; after a kill for memory, what follows from it."""
        if node := memory.short_node(said):
            return memory.run_fewer(self.search, node, [trial for trial in trials if trial is not ended])
        line = (said.strip().splitlines() or ["lost"])[-1].strip()
        return next((line.split(word)[-1] for word in (FAILED, REFUSED) if word in line), line)


def last_failure(trial: Any) -> str:
    """Return the last of the tracebacks that Tune keeps of a trial."""
    try:
        return Path(trial.error_file or "").read_text().rpartition("Failure # ")[2]
    except OSError:
        return ""
