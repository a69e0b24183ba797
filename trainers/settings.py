"""The sections of a trainer's configuration: types and ranges of the keys, and rules that join two of them."""

import importlib.util
from dataclasses import dataclass, replace
from typing import Annotated

from certizoo import UserError
from certizoo.config.schema import (
    Count,
    Ge,
    Gt,
    Le,
    Lt,
    NonNegative,
    OneOf,
    Positive,
    Section,
    Share,
    Source,
    Text,
    Whole,
)
from certizoo.extras import advice

BelowOne = Annotated[float, Ge(0), Lt(1)]
InsideOne = Annotated[float, Gt(0), Lt(1)]
# Not fp16: its loss scaling hides the small gradients that attacks follow.
Precision = Annotated[str, OneOf("fp32", "bf16")]


def require(holds: bool, message: str) -> None:
    """Raise UserError with the message unless the condition holds."""
    if not holds:
        raise UserError(message)


@dataclass(frozen=True)
class TrainKeys(Section):
    """configs/adv_train.yaml, `train`, as written. `batch_size` counts images of all ranks in one optimiser step.

    Attributes:
        certify_images: number of images that are certified and attacked at the end of every certify_every-th epoch, the
            last of the test set (0: none), at the radii certify_eps (None: certify.headline_eps), for about
            certify_seconds.
        log_to: where the rows go, beside the run folder. MLflow gets them wherever registry.enabled is true.
        callbacks: names of trainers.callbacks.CALLBACKS.
        profile: number of steps of which rank 0 writes a trace.
    """

    epochs: Count
    batch_size: Count | None = None
    max_steps: Count | None = None
    micro_batch_size: Count | None = None
    clip_grad: NonNegative = 1.0
    precision: Annotated[str, OneOf("auto", "fp32", "bf16")] = "fp32"
    attack_precision: Precision | None = None
    attack_warmup: Share = 0.0
    grad_checkpointing: bool = False
    compile: Annotated[str, OneOf("auto")] | bool = False
    eval_images: Whole = 512
    certify_images: Whole = 0
    certify_every: Count = 1
    certify_eps: list[Positive] | None = None
    certify_seconds: Positive = 60.0
    log_every: Count = 10
    log_to: tuple[Annotated[str, OneOf("mlflow", "tensorboard", "wandb")], ...] = ()
    callbacks: tuple[Text, ...] = ()
    profile: Whole = 0
    checkpoint_every: Whole = 500
    checkpoint_epochs: Count = 1
    keep_checkpoints: Count = 2
    label_smoothing: BelowOne = 0.0
    sam_rho: NonNegative = 0.0
    ema_decay: BelowOne = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for library in self.log_to:
            require(
                importlib.util.find_spec(library) is not None,
                f"train.log_to: {library} is not installed; {advice(library)}",
            )
        radii = {f"{eps:g}" for eps in self.certify_eps or ()}
        require(
            self.certify_eps is None or 0 < len(radii) == len(self.certify_eps),
            f"train.certify_eps={self.certify_eps}: give different radii, or null for certify.headline_eps",
        )


@dataclass(frozen=True)
class TrainConfig(TrainKeys):
    """The same with the machine's values (trainers/job/auto_settings.py)."""

    batch_size: Count
    precision: Precision = "fp32"
    compile: bool = False

    def micro_batch(self, world_size: int) -> int:
        """Return the images of a rank in one forward pass."""
        return self.micro_batch_size or self.batch_size // world_size

    def accumulation(self, world_size: int) -> int:
        """Return the micro-batches of a rank in one optimiser step: batch_size / (micro_batch_size * world_size).

        The quotient is whole (trainers/job/compatibility.py).
        """
        return self.batch_size // (self.micro_batch(world_size) * world_size)


@dataclass(frozen=True)
class OptimizerConfig(Section):
    """configs/optimizer.

    Attributes:
        lr: for `lr_batch` images a step (null: any number of them).
        lr_scaling: with the batch, "linear" (Goyal et al. 2017) or with its "root" (Krizhevsky 2014).
        decay_all: weight decay for biases, norms, positions and class token as well.
        layer_decay: factor of the learning rate from each layer to the one before it (1: none).
    """

    name: Annotated[str, OneOf("adamw", "sgd", "muon")]
    lr: Positive
    weight_decay: NonNegative = 0.0
    decay_all: bool = False
    layer_decay: Annotated[float, Gt(0), Le(1)] = 1.0
    lr_batch: Count | None = None
    lr_scaling: Annotated[str, OneOf("linear", "root")] = "linear"
    momentum: BelowOne = 0.9
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.999)

    def for_batch(self, size: int) -> "OptimizerConfig":
        """Return the settings with lr * size / lr_batch, or with the root of the ratio."""
        if self.lr_batch in (None, size):
            return self
        ratio = size / self.lr_batch
        return replace(self, lr=self.lr * (ratio if self.lr_scaling == "linear" else ratio**0.5), lr_batch=size)


@dataclass(frozen=True)
class PenaltyConfig(Section):
    """configs/penalty: the weights of MSVP on queries, keys, values, output projections and MLPs; 0 is off."""

    lambda_q: NonNegative = 0.0
    lambda_k: NonNegative = 0.0
    lambda_v: NonNegative = 0.0
    lambda_o: NonNegative = 0.0
    lambda_mlp: NonNegative = 0.0

    @property
    def active(self) -> bool:
        return bool(self.branches)

    @property
    def branches(self) -> list[str]:
        """Return the branches with a weight, as `zoo.penalty` names them."""
        return [key.removeprefix("lambda_") for key, value in vars(self).items() if value]


@dataclass(frozen=True)
class HingeConfig(Section):
    """configs/hinge: the weight of the hinge on spectral norms (0 is off) and the caps of its branches (null: none).

    The caps start `slack` times as large and shrink geometrically to their values while the share of the training that
    is done goes from `tighten[0]` to `tighten[1]`.
    """

    weight: NonNegative = 0.0
    q: Positive | None = None
    k: Positive | None = None
    v: Positive | None = None
    o: Positive | None = None
    mlp: Positive | None = None
    patch: Positive | None = None
    stem: Positive | None = None
    norm: Positive | None = None
    slack: Annotated[float, Ge(1)] = 1.0
    tighten: tuple[Share, Share] = (0.0, 1.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        start, end = self.tighten
        require(start < end, f"hinge.tighten=[{start}, {end}] is invalid; give two rising shares of [0, 1]")

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
class ObjectiveConfig(Section):
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
    eps: NonNegative = 0.0
    ramp: Share = 0.0
    random_rivals: Share = 0.0
    beta: NonNegative = 6.0
    sparsity: NonNegative = 0.0
    curvature: NonNegative = 1.0
    offset: NonNegative = 2.0
    temperature: Annotated[float, Ge(1e-3)] = 0.75
    gamma: NonNegative = 5.0


@dataclass(frozen=True)
class MixConfig(Section):
    """configs/adv_train.yaml, `mix`: alpha of mixup and CutMix (0 is off) and two probabilities.

    The first is that a batch is mixed at all, the second that it is mixed by CutMix if both are on.
    """

    mixup: NonNegative = 0.0
    cutmix: NonNegative = 0.0
    prob: Share = 1.0
    switch_prob: Share = 0.5

    @property
    def active(self) -> bool:
        return self.mixup > 0 or self.cutmix > 0


@dataclass(frozen=True)
class DistillConfig(Section):
    """configs/adv_train.yaml, `distill`: the teacher, alpha and T of trainers/techniques/distill.py.

    `teacher` is a hand-over folder, NAME@ALIAS or NAME/VERSION of the registry, or a name with published weights.
    """

    teacher: Source | None = None
    alpha: Share = 0.9
    temperature: Positive = 4.0


@dataclass(frozen=True)
class MasksConfig(Section):
    """configs/adv_train.yaml, `masks`: ARD and PRM of Mo et al. 2022 in the attack of adversarial training.

    `warmup` is the share of the training over which they fade.
    """

    ard: bool = False
    prm: bool = False
    warmup: Annotated[float, Gt(0), Le(1)] = 0.25

    @property
    def active(self) -> bool:
        return self.ard or self.prm

    def share(self, progress: float) -> float:
        """Return max(0, 1 - t / warmup), the share that is masked when a share t of the training is done."""
        return max(0.0, 1 - progress / self.warmup)


@dataclass(frozen=True)
class ConstrainConfig(Section):
    """configs/constrain.yaml, `constrain`: epochs of stages 1 and 3, settings of stage 2 (douglas_rachford.py)."""

    adapt_epochs: Whole
    finetune_epochs: Whole
    level: InsideOne = 0.1
    eta: InsideOne = 1e-2
    rate: Annotated[float, Gt(0), Lt(2)] = 1.2  # of Douglas-Rachford, which converges for these
    iterations: Count = 20
    passes: Count = 20
    batches: Count = 8
    batch_size: Count = 64
    rows: Count = 512


@dataclass(frozen=True)
class DeepSpeedConfig(Section):
    """configs/deepspeed.

    Attributes:
        stage: of ZeRO: 0 everything on each rank; 1 optimiser state cut over the ranks; 2 gradients too; 3 weights too.
        timeout_minutes: how long a rank waits for the others before it ends the run.
        persistent_below: at stage 3, parameters with at most so many entries stay whole on each rank.
        live_parameters: at stage 3, entries that may stay gathered because they are needed again soon.
        offload_optimizer: keep optimiser state, and update the weights, in CPU memory (stages 1-3).
    """

    stage: Annotated[int, OneOf(0, 1, 2, 3)]
    timeout_minutes: Positive = 30.0
    offload_optimizer: bool = False
    persistent_below: Whole = 100_000
    live_parameters: Whole = 1_000_000_000
