"""Other places that get the rows of metrics.jsonl beside MLflow, by name: `train.log_to=[tensorboard,wandb]`.

Both are extras, imported where a run asks for them. What a resumed run repeats replaces the old values in TensorBoard.
In Weights & Biases every start of a run is a run of its own, in the group of the run's name; WANDB_MODE=offline works.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from certizoo import UserError
from certizoo.registry import credentials
from trainers.job.job import Job

FOLDER = "tensorboard"  # in the run folder


class Sink(Protocol):
    """A place for rows."""

    def row(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self, status: str) -> None: ...


class TensorBoard:
    """Event files in run_dir/tensorboard."""

    def __init__(self, job: Job, first_step: int) -> None:
        import tensorboard  # noqa: F401  (torch's writer needs it; here its absence is one line)
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(job.run_dir / FOLDER), purge_step=first_step + 1)

    def row(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self, status: str) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of the project registry.experiment; its files are in WANDB_DIR."""

    def __init__(self, job: Job, first_step: int) -> None:
        import wandb

        name, project = job.config["name"], job.config["registry"]["experiment"]
        config: dict[str, Any] = credentials.redacted(job.config)
        try:
            self._run = wandb.init(project=project, name=name, group=name, config=config)
        except Exception as error:  # of its own classes: no key, no server
            raise UserError(
                f"train.log_to: Weights & Biases: {' '.join(str(error).split())[:200]}; run `wandb login`, or set "
                "WANDB_MODE=offline"
            ) from None

    def row(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self, status: str) -> None:
        self._run.finish(exit_code=0 if status == "FINISHED" else 1)


SINKS: dict[str, Callable[[Job, int], Sink]] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}
