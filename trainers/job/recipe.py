"""Which parts of a recipe go together: refused here, in one line, before any work."""

from torch import nn

from certizoo import UserError
from certizoo.nearest import choices
from trainers.job.job import Job
from trainers.objectives import LIPSCHITZ, OBJECTIVES, SOFT_LABELS
from trainers.settings import require
from trainers.techniques.masks import check_masks
from zoo.models.reach import check_reach


def check_recipe(job: Job, world_size: int) -> None:
    """Raise UserError for settings that contradict each other."""
    name, mixing = job.objective.name, job.mix.active
    require(name in OBJECTIVES, f"objective.name={name} does not exist; {choices(name, OBJECTIVES)}")
    blur = "mix.mixup and mix.cutmix" if mixing else "train.label_smoothing" if job.train.label_smoothing else ""
    require(
        not blur or name in SOFT_LABELS,
        f"objective={name} needs one class an image, which {blur} would blur; set 0, or use objective="
        f"{'|'.join(SOFT_LABELS)}",
    )
    micro = job.train.micro_batch(world_size)
    require(
        not mixing or micro % 2 == 0, f"mix.* pairs images: make the micro-batch of {micro} even (train.batch_size)"
    )
    _check_attack(job)
    _check_zero(job)


def _check_attack(job: Job) -> None:
    name, attack = job.objective.name, job.attack
    soft = name == "trades" or (name == "pgd_at" and job.mix.active)
    require(
        not soft or attack.loss == "ce",
        f"attack.loss={attack.loss} needs one class an image, and here it is told probabilities; set attack.loss=ce",
    )
    require(
        name != "trades" or attack.random_start,
        "objective=trades needs attack.random_start=true: its divergence has no slope at the image itself",
    )


def _check_zero(job: Job) -> None:
    stage, rho = job.deepspeed.stage, job.train.sam_rho
    require(
        stage < 3 or job.objective.name not in LIPSCHITZ,
        f"objective={job.objective.name} reads weights outside their layers, and deepspeed=zero3 has them only inside; "
        "use deepspeed=zero2",
    )
    require(
        not rho or stage < 3,
        f"train.sam_rho={rho} moves whole weights, which deepspeed=zero3 cuts; use deepspeed=zero2",
    )
    require(
        not rho or job.train.precision == "fp32",
        f"train.sam_rho={rho} moves weights by less than bf16 can tell; use train.precision=fp32",
    )


def check_model(job: Job, model: nn.Module) -> None:
    """Raise UserError for a model that the objective or the masks cannot work on."""
    check_masks(job.masks, model)
    if job.objective.name in LIPSCHITZ:
        try:
            check_reach(model)
        except UserError as error:
            raise UserError(f"objective={job.objective.name}: {error}") from None
