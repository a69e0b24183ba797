"""A trace of some steps by torch.profiler, for chrome://tracing or https://ui.perfetto.dev: `train.profile=N`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch.profiler import profile, schedule

from trainers.steps.run import Run

FILE = "profile.json.gz"  # in the run folder
BEFORE = 4  # steps that compile and fill caches


@contextmanager
def profiled(run: Run) -> Iterator[Callable[[], None]]:
    """Yield the function to call after each step; rank 0 records train.profile steps after the first few."""
    count = run.job.train.profile
    if not count or run.world.rank:
        yield lambda: None
        return
    path = str(run.job.run_dir / FILE)
    steps = schedule(wait=BEFORE, warmup=1, active=count, repeat=1)
    with profile(schedule=steps, on_trace_ready=lambda trace: trace.export_chrome_trace(path)) as recorder:
        yield recorder.step
