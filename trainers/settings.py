"""The typed parts of the configuration. Errors name the wrong value and the allowed ones."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from certizoo import UserError


def require(holds: bool, message: str) -> None:
    """Raise UserError with the message unless the condition holds."""
    if not holds:
        raise UserError(message)


def require_least(config: object, group: str, keys: Iterable[str], least: float, mend: str) -> None:
    """Raise UserError naming the first of these values that is below `least`; None is not checked."""
    for key in keys:
        value = getattr(config, key)
        require(value is None or value >= least, f"{group}.{key}={value} does not work; {mend}")


def require_shares(config: object, group: str, keys: Iterable[str]) -> None:
    """Raise UserError naming the first of these values that is not in [0, 1]."""
    for key in keys:
        value = getattr(config, key)
        require(0 <= value <= 1, f"{group}.{key}={value} is a share; set it between 0 and 1")


@dataclass(frozen=True)
class TrainConfig:
    """configs/adv_train.yaml, `train`. `batch_size` counts images of all ranks in one optimiser step.

    Attributes:
        certify_images: number of images that are certified and attacked at the end of every certify_every-th epoch, the
            last of the test set (0: none), at the radii certify_eps (None: certify.headline_eps), for about
            certify_seconds.
    """

    epochs: int
    batch_size: int
    max_steps: int | None = None
    micro_batch_size: int | None = None
    clip_grad: float = 1.0
    precision: str = "fp32"
    attack_precision: str | None = None
    attack_warmup: float = 0.0
    grad_checkpointing: bool = False
    compile: bool = False
    eval_images: int = 512
    certify_images: int = 0
    certify_every: int = 1
    certify_eps: list[float] | None = None
    certify_seconds: float = 60.0
    log_every: int = 10
    checkpoint_every: int = 500
    checkpoint_epochs: int = 1
    keep_checkpoints: int = 2
    label_smoothing: float = 0.0
    sam_rho: float = 0.0
    ema_decay: float = 0.0

    def __post_init__(self) -> None:
        counts = ("epochs", "batch_size", "max_steps", "micro_batch_size", "log_every", "keep_checkpoints")
        require_least(self, "train", (*counts, "certify_every", "checkpoint_epochs"), 1, "set it to at least 1")
        switches = ("clip_grad", "eval_images", "certify_images", "checkpoint_every", "label_smoothing", "sam_rho")
        require_least(self, "train", switches, 0, "set it to 0 (off) or more")
        require_shares(self, "train", ("attack_warmup",))
        require(self.certify_seconds > 0, f"train.certify_seconds={self.certify_seconds} does not work; set it above 0")
        radii = {f"{eps:g}" for eps in self.certify_eps or () if eps > 0}
        require(
            self.certify_eps is None or 0 < len(radii) == len(self.certify_eps),
            f"train.certify_eps={self.certify_eps}: give different radii above 0, or null for certify.headline_eps",
        )
        require(0 <= self.ema_decay < 1, f"train.ema_decay={self.ema_decay} does not work; 0 (off) or a bit below 1")
        require(self.label_smoothing < 1, f"train.label_smoothing={self.label_smoothing} must stay below 1")
        require(
            self.precision in ("fp32", "bf16"),
            f"train.precision={self.precision} does not exist; use fp32 or bf16 (fp16 breaks attacks: its loss "
            "scaling hides small gradients)",
        )
        require(
            self.attack_precision in (None, "fp32", "bf16"),
            f"train.attack_precision={self.attack_precision} does not exist; use fp32, bf16, or null (as precision)",
        )

    def micro_batch(self, world_size: int) -> int:
        """Return the images of a rank in one forward pass."""
        return self.micro_batch_size or self.batch_size // world_size

    def accumulation(self, world_size: int) -> int:
        """Return the micro-batches of a rank in one optimiser step: batch_size / (micro_batch_size * world_size).

        The quotient is whole (trainers/job/compatibility.py).
        """
        return self.batch_size // (self.micro_batch(world_size) * world_size)


@dataclass(frozen=True)
class OptimizerConfig:
    """configs/optimizer.

    Attributes:
        lr: for `lr_batch` images a step (null: any number of them).
        lr_scaling: with the batch, "linear" (Goyal et al. 2017) or with its "root" (Krizhevsky 2014).
        decay_all: weight decay for biases, norms, positions and class token as well.
    """

    name: str
    lr: float
    weight_decay: float = 0.0
    decay_all: bool = False
    lr_batch: int | None = None
    lr_scaling: str = "linear"
    momentum: float = 0.9
    betas: tuple[float, float] = (0.9, 0.999)

    def __post_init__(self) -> None:
        require(
            self.name in ("adamw", "sgd", "muon"),
            f"optimizer.name={self.name} does not exist; use adamw, sgd or muon",
        )
        require(self.lr > 0, f"optimizer.lr={self.lr} does not work; set it above 0")
        require_least(self, "optimizer", ("lr_batch",), 1, "set it to at least 1, or to null (lr is for any batch)")
        require(
            self.lr_scaling in ("linear", "root"),
            f"optimizer.lr_scaling={self.lr_scaling} does not exist; use linear or root",
        )

    def for_batch(self, size: int) -> "OptimizerConfig":
        """Return the settings with lr * size / lr_batch, or with the root of the ratio."""
        if self.lr_batch in (None, size):
            return self
        ratio = size / self.lr_batch
        return replace(self, lr=self.lr * (ratio if self.lr_scaling == "linear" else ratio**0.5), lr_batch=size)


@dataclass(frozen=True)
class PenaltyConfig:
    """configs/penalty: the weights of MSVP on queries, keys, values, output projections and MLPs; 0 is off."""

    lambda_q: float = 0.0
    lambda_k: float = 0.0
    lambda_v: float = 0.0
    lambda_o: float = 0.0
    lambda_mlp: float = 0.0

    def __post_init__(self) -> None:
        require_least(self, "penalty", vars(self), 0, "set it to 0 (off) or more")

    @property
    def active(self) -> bool:
        return bool(self.branches)

    @property
    def branches(self) -> list[str]:
        """Return the branches with a weight, as `zoo.penalty` names them."""
        return [key.removeprefix("lambda_") for key, value in vars(self).items() if value]


@dataclass(frozen=True)
class HingeConfig:
    """configs/hinge: the weight of the hinge on spectral norms (0 is off) and the caps of its branches (null: none).

    The caps start `slack` times as large and shrink geometrically to their values while the share of the training that
    is done goes from `tighten[0]` to `tighten[1]`.
    """

    weight: float = 0.0
    q: float | None = None
    k: float | None = None
    v: float | None = None
    o: float | None = None
    mlp: float | None = None
    patch: float | None = None
    stem: float | None = None
    norm: float | None = None
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
        return {branch: getattr(self, branch) for branch in ("q", "k", "v", "o", "mlp", "patch", "stem", "norm")}

    @property
    def branches(self) -> list[str]:
        """Return the branches with a cap."""
        return [branch for branch, cap in self.caps.items() if cap is not None]

    def slack_at(self, progress: float) -> float:
        """Return slack^(1 - s), s in [0, 1] the share of the way from tighten[0] to tighten[1]."""
        start, end = self.tighten
        done = min(max((progress - start) / (end - start), 0.0), 1.0)
        return float(self.slack ** (1 - done))


@dataclass(frozen=True)
class ObjectiveConfig:
    """configs/objective.

    Attributes:
        eps: an L2 radius in [0,1] pixels, reached after `ramp` (a share) of the training: lmce, emma, curvature, gloro,
            lmt, local_lip.
        random_rivals: a share of the images: lmce, emma, curvature.
        beta: the weight of the divergence between clean and attacked (trades, mart) or to bottom (gloro).
        sparsity: the weight of the loss that makes more hidden units constant in the ball: local_lip.
        curvature: the weight of the margin's second-order loss: curvature.
        offset, temperature, gamma: xi, T and gamma of logit_annealing.
    """

    name: str
    eps: float = 0.0
    ramp: float = 0.0
    random_rivals: float = 0.0
    beta: float = 6.0
    sparsity: float = 0.0
    curvature: float = 1.0
    offset: float = 2.0
    temperature: float = 0.75
    gamma: float = 5.0

    def __post_init__(self) -> None:
        zero = ("eps", "beta", "sparsity", "curvature", "offset", "gamma")
        require_least(self, "objective", zero, 0, "set it to 0 or more")
        require_least(self, "objective", ("temperature",), 1e-3, "set it to 1e-3 or more")
        require_shares(self, "objective", ("ramp", "random_rivals"))


@dataclass(frozen=True)
class MixConfig:
    """configs/adv_train.yaml, `mix`: alpha of mixup and CutMix (0 is off) and two probabilities.

    The first is that a batch is mixed at all, the second that it is mixed by CutMix if both are on.
    """

    mixup: float = 0.0
    cutmix: float = 0.0
    prob: float = 1.0
    switch_prob: float = 0.5

    def __post_init__(self) -> None:
        require_least(self, "mix", ("mixup", "cutmix"), 0, "set it to 0 (off) or more")
        require_shares(self, "mix", ("prob", "switch_prob"))

    @property
    def active(self) -> bool:
        return self.mixup > 0 or self.cutmix > 0


@dataclass(frozen=True)
class MasksConfig:
    """configs/adv_train.yaml, `masks`: ARD and PRM of Mo et al. 2022 in the attack of adversarial training.

    `warmup` is the share of the training over which they fade.
    """

    ard: bool = False
    prm: bool = False
    warmup: float = 0.25

    def __post_init__(self) -> None:
        require(0 < self.warmup <= 1, f"masks.warmup={self.warmup} is a share; set it above 0, at most 1")

    @property
    def active(self) -> bool:
        return self.ard or self.prm

    def share(self, progress: float) -> float:
        """Return max(0, 1 - t / warmup), the share that is masked when a share t of the training is done."""
        return max(0.0, 1 - progress / self.warmup)


@dataclass(frozen=True)
class ConstrainConfig:
    """configs/constrain.yaml, `constrain`: epochs of stages 1 and 3, settings of stage 2 (douglas_rachford.py)."""

    adapt_epochs: int
    finetune_epochs: int
    level: float = 0.1
    eta: float = 1e-2
    rate: float = 1.2
    iterations: int = 20
    passes: int = 20
    batches: int = 8
    batch_size: int = 64
    rows: int = 512

    def __post_init__(self) -> None:
        counts = ("iterations", "passes", "batches", "batch_size", "rows")
        require_least(self, "constrain", counts, 1, "use at least 1")
        require_least(self, "constrain", ("adapt_epochs", "finetune_epochs"), 0, "set it to 0 or more")
        require(0 < self.level < 1, f"constrain.level={self.level} is a share; set it between 0 and 1")
        require(0 < self.eta < 1, f"constrain.eta={self.eta} is a share; set it between 0 and 1")
        require(0 < self.rate < 2, f"constrain.rate={self.rate} does not converge; set it between 0 and 2")


@dataclass(frozen=True)
class DeepSpeedConfig:
    """configs/deepspeed.

    Attributes:
        stage: of ZeRO: 0 everything on each rank; 1 optimiser state cut over the ranks; 2 gradients too; 3 weights too.
        timeout_minutes: how long a rank waits for the others before it ends the run.
        persistent_below: at stage 3, parameters with at most so many entries stay whole on each rank.
        live_parameters: at stage 3, entries that may stay gathered because they are needed again soon.
        offload_optimizer: keep optimiser state, and update the weights, in CPU memory (stages 1-3).
    """

    stage: int
    timeout_minutes: float = 30.0
    offload_optimizer: bool = False
    persistent_below: int = 100_000
    live_parameters: int = 1_000_000_000

    def __post_init__(self) -> None:
        require(
            self.stage in (0, 1, 2, 3),
            f"deepspeed.stage={self.stage} does not exist; use 0, 1, 2 or 3 (deepspeed=zero0 ... zero3)",
        )
        require_least(self, "deepspeed", ("persistent_below", "live_parameters"), 0, "set it to 0 or more")
