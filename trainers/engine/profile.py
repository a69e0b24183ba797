"""A trace of some steps by torch.profiler, for chrome://tracing or https://ui.perfetto.dev: `train.profile=N`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.profiler import profile, schedule

FILE = "profile.json.gz"  # in the run folder
BEFORE = 4  # steps that compile and fill caches


@contextmanager
def profiled(run_dir: Path, steps: int) -> Iterator[Callable[[], None]]:
    """Yield the function to call after each step; `steps` of them are recorded, after the first few."""
    if not steps:
        yield lambda: None
        return
    path = str(run_dir / FILE)
    times = schedule(wait=BEFORE, warmup=1, active=steps, repeat=1)
    with profile(schedule=times, on_trace_ready=lambda trace: trace.export_chrome_trace(path)) as recorder:
        yield recorder.step
