"""Other places that get the rows of metrics.jsonl beside MLflow, by name: `train.log_to=[tensorboard,wandb]`.

Both are extras, imported where a run asks for them. What a resumed run repeats replaces the old values in TensorBoard.
In Weights & Biases every start of a run is a run of its own, in the group of the run's name; WANDB_MODE=offline works.
"""

from typing import Any

from certizoo import UserError
from certizoo.registry.server import credentials
from trainers.callbacks import CALLBACKS, Callback, Callbacks, Make, Metrics
from trainers.job.job import Job

FOLDER = "tensorboard"  # in the run folder


class Sink(Callback):
    """A place for rows of both kinds."""

    def on_epoch(self, step: int, epoch: int, metrics: Metrics) -> None:
        self.on_step(step, metrics)


class TensorBoard(Sink):
    """Event files in run_dir/tensorboard."""

    def __init__(self, job: Job, first_step: int) -> None:
        import tensorboard  # noqa: F401  (torch's writer needs it; here its absence is one line)
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(job.run_dir / FOLDER), purge_step=first_step + 1)

    def on_step(self, step: int, metrics: Metrics) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def on_end(self, status: str) -> None:
        self._writer.close()


class WeightsAndBiases(Sink):
    """A run of the project registry.experiment; its files are in WANDB_DIR."""

    def __init__(self, job: Job, first_step: int) -> None:
        import wandb

        name, project = job.config["name"], job.config["registry"]["experiment"]
        config: dict[str, Any] = credentials.redacted(job.config)
        try:
            self._run = wandb.init(project=project, name=name, group=name, config=config)
        except Exception as error:  # of its own classes: no key, no server
            raise UserError(f"{error}; run `wandb login`, or set WANDB_MODE=offline") from None

    def on_step(self, step: int, metrics: Metrics) -> None:
        self._run.log(dict(metrics), step=step)

    def on_end(self, status: str) -> None:
        self._run.finish(exit_code=0 if status == "FINISHED" else 1)


SINKS: dict[str, Make] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}


def callbacks_of(job: Job) -> Callbacks:
    """Return those of train.log_to and train.callbacks. MLflow has its own door, the report's tracker."""
    sinks = {f"train.log_to={name}": SINKS[name] for name in job.train.log_to if name in SINKS}
    return Callbacks(job, sinks | {f"train.callbacks={name}": CALLBACKS[name] for name in job.train.callbacks})
