"""The typed parts of the configuration. A wrong value is named, with what would be right."""

from dataclasses import dataclass

from certizoo import UserError


def require(holds: bool, message: str) -> None:
    """Raise UserError with the message unless it holds."""
    if not holds:
        raise UserError(message)


@dataclass(frozen=True)
class TrainConfig:
    """configs/adv_train.yaml, `train`. `batch_size` counts images of all ranks in one optimiser step."""

    epochs: int
    batch_size: int
    max_steps: int | None = None
    micro_batch_size: int | None = None
    clip_grad: float = 1.0
    precision: str = "fp32"
    eval_images: int = 512
    log_every: int = 10
    checkpoint_every: int = 500
    keep_checkpoints: int = 2
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        for key in ("epochs", "batch_size", "max_steps", "micro_batch_size", "log_every", "keep_checkpoints"):
            value = getattr(self, key)
            require(value is None or value >= 1, f"train.{key}={value} does not work; set it to at least 1")
        for key in ("clip_grad", "eval_images", "checkpoint_every", "label_smoothing"):
            value = getattr(self, key)
            require(value >= 0, f"train.{key}={value} does not work; set it to 0 (off) or more")
        require(self.label_smoothing < 1, f"train.label_smoothing={self.label_smoothing} must stay below 1")
        require(
            self.precision in ("fp32", "bf16"),
            f"train.precision={self.precision} does not exist; use fp32 or bf16 (fp16 breaks attacks: its loss "
            "scaling hides small gradients)",
        )

    def micro_batch(self, world_size: int) -> int:
        """Images a rank sees in one forward."""
        require(
            self.batch_size % world_size == 0,
            f"train.batch_size={self.batch_size} cannot be shared by {world_size} ranks; make it a multiple",
        )
        return self.micro_batch_size or self.batch_size // world_size

    def accumulation(self, world_size: int) -> int:
        """Micro-batches of a rank in one optimiser step: batch_size / (micro_batch_size * world_size)."""
        together = self.micro_batch(world_size) * world_size
        require(
            self.batch_size % together == 0,
            f"train.batch_size={self.batch_size} is not a multiple of train.micro_batch_size * ranks = "
            f"{self.micro_batch_size} * {world_size}; change one of them",
        )
        return self.batch_size // together


@dataclass(frozen=True)
class OptimizerConfig:
    """configs/optimizer. Weight decay is for matrices only: biases and norms are left alone."""

    name: str
    lr: float
    weight_decay: float = 0.0
    momentum: float = 0.9
    betas: tuple[float, float] = (0.9, 0.999)

    def __post_init__(self) -> None:
        require(self.name in ("adamw", "sgd"), f"optimizer.name={self.name} does not exist; use adamw or sgd")
        require(self.lr > 0, f"optimizer.lr={self.lr} does not work; set it above 0")


@dataclass(frozen=True)
class PenaltyConfig:
    """configs/penalty: the weights of MSVP on queries, keys, values, output projections and MLPs; 0 is off."""

    lambda_q: float = 0.0
    lambda_k: float = 0.0
    lambda_v: float = 0.0
    lambda_o: float = 0.0
    lambda_mlp: float = 0.0

    def __post_init__(self) -> None:
        for key, value in vars(self).items():
            require(value >= 0, f"penalty.{key}={value} does not work; set it to 0 (off) or more")

    @property
    def active(self) -> bool:
        return any(vars(self).values())


@dataclass(frozen=True)
class ObjectiveConfig:
    """configs/objective."""

    name: str


@dataclass(frozen=True)
class DeepSpeedConfig:
    """configs/deepspeed. `timeout_minutes`: how long a rank waits for the others before it gives the run up."""

    stage: int
    timeout_minutes: float = 30.0

    def __post_init__(self) -> None:
        require(
            self.stage in (0, 1, 2),
            f"deepspeed.stage={self.stage} is not supported yet: weight penalties and attacks need whole weights "
            "on each rank; use deepspeed=zero2",
        )
