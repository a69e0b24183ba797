"""The entry point of training: the launcher's flag, Hydra, and one-line errors.

The configuration is composed here instead of by `hydra.main`, which would give each rank its own output folder and does
not accept the launcher's `--local_rank`. Every rank composes the same configuration; rank 0 writes run_dir/config.yaml.
"""

import errno
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from certizoo.config.compose import compose_config
from certizoo.config.help import config_help, wants_help
from certizoo.errors import EXIT_USER_ERROR, UserError, one_line_errors
from certizoo.imports import large_imports
from trainers import ranks
from trainers.engine.launcher import killed, launchers

FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
Work = Callable[[str, Sequence[str]], None]


def main(config_name: str, argv: Sequence[str] | None = None, work: Work | None = None) -> None:
    """Train (or call `work`) with `configs/{config_name}.yaml` and the arguments; exit 2 after a one-line error."""
    launchers()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    overrides = launcher_argv(sys.argv[1:] if argv is None else argv)
    if wants_help(overrides):
        print_help(config_name)
        return
    with leaving_no_rank_behind():
        one_line_errors(one_of_a_machine)(work or train, config_name, overrides)


def print_help(config_name: str) -> None:
    """Print the help once on each machine."""
    from trainers.job.keys import TrainerKeys

    if ranks.local_rank() == 0:
        sys.stdout.write(config_help(f"deepspeed trainers/{config_name}.py", config_name, TrainerKeys))


def one_of_a_machine(work: Work, config_name: str, overrides: Sequence[str]) -> None:
    """Call `work`; a UserError ends local rank 0 at once and the others after the launcher's signal."""
    try:
        with full_disks_in_one_line():
            work(config_name, overrides)
    except UserError:
        time.sleep(ranks.GRACE_SECONDS if ranks.local_rank() else 0)
        raise


@contextmanager
def full_disks_in_one_line() -> Iterator[None]:
    """Turn a full disk into a one-line error. Checkpoints report their own: trainers/weights/saving.py."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise UserError(
            f"{error.filename or 'a file of the run'} could not be written ({error.strerror}); free some "
            "space, then repeat the command with resume=auto"
        ) from None


def train(config_name: str, overrides: Sequence[str]) -> None:
    """Compose, check and train; then rank 0 certifies and publishes."""
    with ranks.said_once():
        config = compose_config(config_name, overrides)
        with large_imports():  # after the checks that need no large imports
            from trainers.job.prepare import prepare
        job = prepare(config)
    with large_imports():
        from trainers.engine import engine
        from trainers.job.folder import refuse_changed
        from trainers.steps import loop
        from trainers.steps.run_lock import run_lock
        from trainers.weights import handover

    world = engine.start(job.deepspeed.timeout_minutes)
    with run_lock(job.run_dir, world, partial(refuse_changed, job)):
        loop.train(job, world)
        if world.rank == 0:
            handover.certify_and_publish(job)


def launcher_argv(argv: Sequence[str]) -> list[str]:
    """Return the arguments without the launcher's --local_rank=N, which is set in the environment beside RANK."""
    kept, rest = [], iter(argv)
    for argument in rest:
        key, given, value = argument.partition("=")
        if key in ("--local_rank", "--local-rank"):
            os.environ.setdefault("LOCAL_RANK", value if given else next(rest, "0"))
        else:
            kept.append(argument)
    return kept


@contextmanager
def leaving_no_rank_behind() -> Iterator[None]:
    """End a failed rank at once: a regular exit could wait forever for the other ranks.

    The launcher sees the exit status and ends the rest.
    """
    try:
        yield
    except BaseException as error:
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized()):
            raise
        if isinstance(error, SystemExit):
            status = error.code if isinstance(error.code, int) else EXIT_USER_ERROR
        elif isinstance(error, RuntimeError) and any(words in str(error) for words in ranks.PEER_GONE):
            # Not this rank's fault: the rank that ended first has printed why, unless it was killed.
            sys.stderr.write(f"{lost(dist.get_rank())}\n")
            status = 1
        else:
            traceback.print_exc()
            status = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def lost(rank: int) -> str:
    """Describe the loss of another rank. A rank that was killed could print nothing itself."""
    how = killed()
    if how:
        return f"error: {'; '.join(how)}; repeat the command with resume=auto to continue from the newest checkpoint"
    return f"rank {rank} lost another rank and ends too"
