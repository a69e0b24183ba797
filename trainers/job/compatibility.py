"""Options that exclude each other: one small function for every refusal, listed in RULES.

`prepare` calls all rules on every rank, before the process group exists and before anything is written. `python -m
trainers.doctor` calls `prepare`. A rule raises UserError: one line that names the conflict and how to resolve it.

Checked elsewhere: single wrong values (settings.py, schedule.py, and those of attacks, shards and certify), names that
the zoo does not know, a run folder in use and a checkpoint of other settings (prepare.py, checkpoint.py).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

import zoo
from certizoo import UserError
from certizoo.attacks import AttackConfig
from certizoo.files import require_file_name
from certizoo.inputs import require_radius
from certizoo.nearest import choices
from certizoo.registry.versions import version_tags
from certizoo.shards import require_fit
from certizoo.shards.format.config import TEXT
from trainers.callbacks import CALLBACKS
from trainers.job.job import Job, certify_settings
from trainers.model_parts import attentions_of, blocks_of, owners_of
from trainers.objectives import LIPSCHITZ, OBJECTIVES, OF_TEXT, SECOND_ORDER, SOFT_LABELS
from trainers.settings import ConstrainConfig, require
from zoo.attention.dot_product import DotProductAttention
from zoo.models import overview
from zoo.models.hidden_radius import check_reach


@dataclass(frozen=True)
class Combination:
    """The values that rules may read."""

    job: Job
    ranks: int

    @property
    def objective(self) -> str:
        return self.job.objective.name

    @property
    def stage(self) -> int:
        return self.job.deepspeed.stage

    @property
    def attacks(self) -> dict[str, AttackConfig]:
        """Return the attacks by key prefix: that of training and its monitor, and that beside the certificates."""
        certified = self.job.config["certify"]["enabled"]
        return {"": self.job.attack} | ({"certify.": certify_settings(self.job).attack} if certified else {})

    @cached_property
    def model(self) -> nn.Module:
        """Return the modules with shapes but no memory for weights: a ViT-L takes a tenth of a second."""
        with torch.device("meta"):
            return zoo.create_model(**self.job.model)


Rule = Callable[[Combination], None]


def check_compatibility(job: Job, ranks: int) -> None:
    """Raise UserError for the first rule that the job breaks on this number of ranks."""
    combination = Combination(job, ranks)
    for rule in RULES:
        rule(combination)


# objective, labels, attack -------------------------------------------------------------------------------------------


def the_name_is_that_of_one_folder(r: Combination) -> None:
    require_file_name(r.job.config["name"], "name")


def the_objective_exists(r: Combination) -> None:
    require(
        r.objective in OBJECTIVES,
        f"objective.name={r.objective} does not exist; {choices(r.objective, OBJECTIVES)}",
    )


def blurred_labels_suit_the_objective(r: Combination) -> None:
    smooth = "train.label_smoothing" if r.job.train.label_smoothing else ""
    blur = "mix.mixup and mix.cutmix" if r.job.mix.active else smooth
    require(
        not blur or r.objective in SOFT_LABELS,
        f"objective={r.objective} needs one class per image, but {blur} gives probabilities; set 0, or use objective="
        f"{'|'.join(SOFT_LABELS)}",
    )


def a_teacher_suits_the_objective(r: Combination) -> None:
    require(
        r.job.teacher is None or r.objective in SOFT_LABELS,
        f"objective={r.objective} does not take the soft targets of distill.teacher; use objective="
        f"{'|'.join(SOFT_LABELS)}, or distill.teacher=null",
    )


def the_teacher_takes_the_data(r: Combination) -> None:
    if r.job.teacher:
        r.job.teacher.require_fit(r.job.data)


def an_attack_on_probabilities_climbs_their_cross_entropy(r: Combination) -> None:
    soft = r.objective == "trades" or (r.objective == "pgd_at" and r.job.mix.active)
    loss = r.job.attack.loss
    require(
        not soft or loss == "ce",
        f"attack.loss={loss} needs one class per image, but it gets probabilities here; set attack.loss=ce",
    )


def trades_starts_beside_the_image(r: Combination) -> None:
    require(
        r.objective != "trades" or r.job.attack.random_start,
        "objective=trades needs attack.random_start=true: the gradient of its divergence is 0 at the image itself",
    )


def attacks_suit_the_model(r: Combination) -> None:
    for key, attack in r.attacks.items():
        try:
            attack.require_model(r.model, r.job.model["num_classes"], r.job.model["img_size"])
        except UserError as error:
            raise UserError(f"{key}{error}") from None


# batches -------------------------------------------------------------------------------------------------------------


def ranks_share_the_batch(r: Combination) -> None:
    size = r.job.train.batch_size
    require(size % r.ranks == 0, f"train.batch_size={size} is not a multiple of the {r.ranks} ranks; change it")


def micro_batches_make_the_batch(r: Combination) -> None:
    train = r.job.train
    require(
        train.batch_size % (train.micro_batch(r.ranks) * r.ranks) == 0,
        f"train.batch_size={train.batch_size} is not a multiple of train.micro_batch_size * ranks = "
        f"{train.micro_batch_size} * {r.ranks}; change one of them",
    )


def images_make_a_batch(r: Combination) -> None:
    size, images = r.job.train.batch_size, r.job.train_set.samples
    require(size <= images, f"train.batch_size={size} is more than the {images} training images; lower it")


def the_warm_up_ends(r: Combination) -> None:
    warmup, epochs = r.job.schedule.warmup_epochs, r.job.train.epochs
    require(
        warmup is None or warmup < epochs,
        f"schedule.warmup_epochs={warmup} is the whole training (train.epochs={epochs}), and the learning rate would "
        "never fall; set a smaller one, or null for a twentieth",
    )


def mixing_finds_pairs(r: Combination) -> None:
    micro = r.job.train.micro_batch(r.ranks)
    require(
        not r.job.mix.active or micro % 2 == 0,
        f"mix.* pairs images, but a micro-batch has {micro}; make it even by train.batch_size",
    )


# ZeRO, precision, memory, speed --------------------------------------------------------------------------------------


def offloading_needs_optimiser_state_of_zero(r: Combination) -> None:
    require(
        not r.job.deepspeed.offload_optimizer or r.stage > 0,
        "deepspeed.offload_optimizer=true needs deepspeed=zero1 or higher",
    )


def muon_needs_whole_matrices(r: Combination) -> None:
    require(
        r.job.optimizer.name != "muon" or r.stage == 0,
        "optimizer=muon needs whole matrices, but ZeRO cuts them over ranks; use deepspeed=zero0, or optimizer=adamw",
    )


def the_average_needs_whole_weights(r: Combination) -> None:
    decay = r.job.train.ema_decay
    require(
        not decay or r.stage < 3,
        f"train.ema_decay={decay} needs whole weights on each rank; use deepspeed=zero2, or train.ema_decay=0",
    )


def lipschitz_objectives_need_whole_weights(r: Combination) -> None:
    require(
        r.objective not in LIPSCHITZ or r.stage < 3,
        f"objective={r.objective} reads weights outside their layers, but deepspeed=zero3 gathers them only inside; "
        "use deepspeed=zero2",
    )


def second_derivatives_need_whole_weights(r: Combination) -> None:
    require(
        r.objective not in SECOND_ORDER or r.stage < 3,
        f"objective={r.objective} differentiates an input gradient, but deepspeed=zero3 has by then freed the "
        "weights; use deepspeed=zero2",
    )


def sam_needs_whole_weights(r: Combination) -> None:
    rho = r.job.train.sam_rho
    require(
        not rho or r.stage < 3,
        f"train.sam_rho={rho} needs whole weights, but deepspeed=zero3 cuts them over ranks; use deepspeed=zero2",
    )


def sam_needs_float32(r: Combination) -> None:
    rho = r.job.train.sam_rho
    require(
        not rho or r.job.train.precision == "fp32",
        f"train.sam_rho={rho} moves weights by less than bf16 can represent; use train.precision=fp32",
    )


def what_is_compiled_runs_once_and_has_one_derivative(r: Combination) -> None:
    train = r.job.train
    require(
        not (train.compile and (train.grad_checkpointing or r.objective in SECOND_ORDER)),
        "train.compile=true works neither with train.grad_checkpointing nor with second derivatives (objective="
        f"{r.objective}); set train.compile=false",
    )


def a_recomputed_block_has_one_derivative(r: Combination) -> None:
    require(
        not (r.job.train.grad_checkpointing and r.objective in SECOND_ORDER),
        f"train.grad_checkpointing=true recomputes a block for one derivative, but objective={r.objective} takes two; "
        "set train.grad_checkpointing=false",
    )


def a_recomputed_block_draws_no_mask(r: Combination) -> None:
    require(
        not (r.job.train.grad_checkpointing and r.job.masks.ard),
        "train.grad_checkpointing=true would draw new masks of masks.ard in its second pass; set one of them to false",
    )


# the model -----------------------------------------------------------------------------------------------------------


def the_model_can_be_built(r: Combination) -> None:
    _ = r.model


def the_model_takes_the_data(r: Combination) -> None:
    require_fit(r.job.data, r.job.model)


def text_has_its_objectives(r: Combination) -> None:
    text, job = r.job.data.kind == TEXT, r.job
    require(
        not text or r.objective in OF_TEXT,
        f"objective={r.objective} is not for text; choose one of {', '.join(sorted(OF_TEXT))}",
    )
    require(not text or r.stage < 3, "words are embedded outside their layer; use deepspeed=zero2 for text")
    require(
        not text or not (job.mix.active or job.masks.prm or job.train.grad_checkpointing or job.teacher),
        "mix.*, masks.prm, train.grad_checkpointing and distill.teacher are for images; set them to 0, false or null "
        "for text",
    )


def lipschitz_objectives_suit_the_model(r: Combination) -> None:
    if r.objective in LIPSCHITZ:
        try:
            check_reach(r.model)
        except UserError as error:
            raise UserError(f"objective={r.objective}: {error}") from None


def recomputing_finds_blocks(r: Combination) -> None:
    require(
        not r.job.train.grad_checkpointing or bool(blocks_of(r.model)),
        "train.grad_checkpointing=true recomputes blocks, but this model has none; set it to false",
    )


def masks_find_attention_and_patches(r: Combination) -> None:
    masks, kind = r.job.masks, type(r.model).__name__
    require(
        not masks.ard or bool(attentions_of(r.model)),
        f"masks.ard=true: {kind} has no attention to drop; set masks.ard=false",
    )
    require(
        not masks.prm or hasattr(r.model, "patch_embed"),
        f"masks.prm=true: {kind} has no patches to mask; set masks.prm=false",
    )


def penalties_find_weights(r: Combination) -> None:
    for group, config in (("penalty", r.job.penalty), ("hinge", r.job.hinge)):
        require(
            not config.active or bool(owners_of(r.model, config.branches)),
            f"{group}: {type(r.model).__name__} has no weights in the chosen branches "
            f"({', '.join(config.branches) or 'none'}); use {group}=none",
        )


def certificates_have_rules_for_the_model(r: Combination) -> None:
    if r.job.config["certify"]["enabled"]:
        method = certify_settings(r.job).method
        reason = missing_rule(
            r.job.model,
            {"auto": "lofast", "lofast_local": "lofast", "best": "lofast", "image": "adjoint"}.get(method, method),
        )
        require(not reason, f"certify.method={method}: {reason}; train without certificates by certify.enabled=false")


def probes_exclude_reported_images(r: Combination) -> None:
    job, certify = r.job, r.job.config["certify"]
    if not (certify["enabled"] and job.train.certify_images and job.test_set):
        return
    free = job.test_set.samples - job.train.certify_images
    require(
        free > 0 and certify["images"] is not None and certify["images"] <= free,
        f"train.certify_images={job.train.certify_images} takes the last of {job.test_set.samples} test images, and "
        f"certify.images={certify['images']} overlaps them, but images used to choose a run must not be reported; "
        + (f"set certify.images={free} or less" if free > 0 else "set train.certify_images lower"),
    )


def probes_are_of_radii_in_the_norm(r: Combination) -> None:
    if r.job.train.certify_eps and r.job.config["certify"]["enabled"]:
        require_radius("train.certify_eps", max(r.job.train.certify_eps), certify_settings(r.job).norm)


def probes_need_unpatched_torch(r: Combination) -> None:
    """Refuse ZeRO 3, which replaces torch's linear function by one without a certificate."""
    require(
        r.stage < 3 or not r.job.train.certify_images or not r.job.config["certify"]["enabled"],
        "train.certify_images: a model cannot be certified during training with deepspeed.stage=3; set it to 0, or use "
        "a stage below 3",
    )


def missing_rule(model: Mapping[str, Any], method: str) -> str:
    """Return why a method cannot certify the model; '' if it can, or if only the method itself can tell."""
    options = {key: value for key, value in model.items() if key != "name"}
    try:
        return overview.rules_refusal(model["name"], method, **options) if method in overview.RULES else ""
    except UserError:  # these options make no tiny model
        return ""


# what hears of the run ----------------------------------------------------------------------------------------------


def callbacks_exist(r: Combination) -> None:
    for name in r.job.train.callbacks:
        require(
            name in CALLBACKS,
            f"train.callbacks={name} does not exist; {choices(name, CALLBACKS)}. Packages add callbacks: "
            "docs/howto/my_package.md",
        )


def rows_for_mlflow_are_sent(r: Combination) -> None:
    require(
        "mlflow" not in r.job.train.log_to or r.job.config["registry"]["enabled"],
        "train.log_to names mlflow, but registry.enabled=false sends it nothing; set registry.enabled=true",
    )


# the registry --------------------------------------------------------------------------------------------------------


def tags_are_not_reserved(r: Combination) -> None:
    version_tags.refuse_given(r.job.config["registry"]["tags"] or {}, "registry.tags")


RULES: tuple[Rule, ...] = (
    the_name_is_that_of_one_folder,
    the_objective_exists,
    blurred_labels_suit_the_objective,
    a_teacher_suits_the_objective,
    the_teacher_takes_the_data,
    an_attack_on_probabilities_climbs_their_cross_entropy,
    trades_starts_beside_the_image,
    ranks_share_the_batch,
    micro_batches_make_the_batch,
    images_make_a_batch,
    the_warm_up_ends,
    mixing_finds_pairs,
    offloading_needs_optimiser_state_of_zero,
    muon_needs_whole_matrices,
    the_average_needs_whole_weights,
    lipschitz_objectives_need_whole_weights,
    second_derivatives_need_whole_weights,
    sam_needs_whole_weights,
    sam_needs_float32,
    what_is_compiled_runs_once_and_has_one_derivative,
    a_recomputed_block_has_one_derivative,
    a_recomputed_block_draws_no_mask,
    the_model_can_be_built,
    text_has_its_objectives,
    lipschitz_objectives_suit_the_model,
    recomputing_finds_blocks,
    masks_find_attention_and_patches,
    penalties_find_weights,
    attacks_suit_the_model,
    the_model_takes_the_data,
    certificates_have_rules_for_the_model,
    probes_exclude_reported_images,
    probes_are_of_radii_in_the_norm,
    probes_need_unpatched_torch,
    callbacks_exist,
    rows_for_mlflow_are_sent,
    tags_are_not_reserved,
)


# CertViT (trainers/job/stages.py) ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ConstrainCombination(Combination):
    """The values that CertViT's rules may also read; the job is that of stage 1."""

    settings: ConstrainConfig


ConstrainRule = Callable[[ConstrainCombination], None]


def check_constrain(job: Job, ranks: int, settings: ConstrainConfig) -> None:
    """Raise UserError for the first of CertViT's own rules that the job breaks."""
    combination = ConstrainCombination(job, ranks, settings)
    for rule in CONSTRAIN_RULES:
        rule(combination)


def there_are_weights_to_constrain(r: ConstrainCombination) -> None:
    require(
        bool(r.settings.adapt_epochs or r.job.config["pretrained"]),
        "constrain.adapt_epochs=0 leaves nothing to constrain; add pretrained=WEIGHTS",
    )


def the_product_has_rules_for_the_model(r: ConstrainCombination) -> None:
    """Require rules for `certify.papers.published.product`, which report.json contains.

    Dot-product attention needs none.
    """
    if not any(isinstance(module, DotProductAttention) for module in r.model.modules()):
        reason = missing_rule(r.job.model, "lofast")
        require(not reason, f"{r.job.model['name']} has no product of norms to lower: {reason}")


CONSTRAIN_RULES: tuple[ConstrainRule, ...] = (
    there_are_weights_to_constrain,
    the_product_has_rules_for_the_model,
)
