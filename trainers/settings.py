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
class HingeConfig:
    """configs/hinge: the weight of the hinge on spectral norms (0 is off) and the caps of its branches (null: free).

    The caps start `slack` times as large and shrink to their values, geometrically, while the share of the training
    that is done goes from `tighten[0]` to `tighten[1]`.
    """

    weight: float = 0.0
    q: float | None = None
    k: float | None = None
    v: float | None = None
    o: float | None = None
    mlp: float | None = None
    slack: float = 1.0
    tighten: tuple[float, float] = (0.0, 1.0)

    def __post_init__(self) -> None:
        require(self.weight >= 0, f"hinge.weight={self.weight} does not work; set it to 0 (off) or more")
        for branch, cap in self.caps.items():
            require(cap is None or cap > 0, f"hinge.{branch}={cap} does not work; set it above 0, or to null (free)")
        require(self.slack >= 1, f"hinge.slack={self.slack} does not work; set it to 1 (none) or more")
        start, end = self.tighten
        require(0 <= start < end <= 1, f"hinge.tighten=[{start}, {end}] does not work; two rising shares of [0, 1]")

    @property
    def active(self) -> bool:
        return self.weight > 0

    @property
    def caps(self) -> dict[str, float | None]:
        return {branch: getattr(self, branch) for branch in ("q", "k", "v", "o", "mlp")}

    def slack_at(self, progress: float) -> float:
        """slack^(1 - s), s in [0, 1] the share of the way from tighten[0] to tighten[1]."""
        start, end = self.tighten
        done = min(max((progress - start) / (end - start), 0.0), 1.0)
        return float(self.slack ** (1 - done))


@dataclass(frozen=True)
class ObjectiveConfig:
    """configs/objective. `eps` is an L2 radius in [0,1] pixels, reached after `ramp` (a share) of the training; the two
    and `random_rivals` (a share of the images) are those of `lmce`."""

    name: str
    eps: float = 0.0
    ramp: float = 0.0
    random_rivals: float = 0.0

    def __post_init__(self) -> None:
        require(self.eps >= 0, f"objective.eps={self.eps} does not work; set it to 0 or more")
        for key in ("ramp", "random_rivals"):
            value = getattr(self, key)
            require(0 <= value <= 1, f"objective.{key}={value} is a share; set it between 0 and 1")


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
