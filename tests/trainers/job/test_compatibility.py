"""Every rule of trainers/job/compatibility.py refuses its case before any work, in the trainer and the doctor alike."""

import ast
import re
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import certizoo.shards.__main__
import zoo
from certizoo import UserError
from certizoo.config.compose import compose_config
from tests.tools.cases import mostly_slow
from tests.tools.launching import ROOT, TINY
from tests.tools.teachers import save_teacher
from tests.tools.workers.objectives import CONV
from trainers import entry
from trainers.certvit import run as certvit
from trainers.doctor import findings
from trainers.engine import engine
from trainers.job.compatibility import CONSTRAIN_RULES, RULES
from trainers.job.stages import prepare_first

CERTVIT = (
    "+model=l2_certvit_mnist", "model.embed_dim=32", "model.depth=2", "model.num_heads=2", "model.patch_size=4",
    "data=digits", "train.batch_size=64", "registry.enabled=false", "certify.enabled=false",
)  # fmt: skip
UNTIED = "model.attention={name:l2,tied:false}"  # no certificate has a rule for it

TEXT = (
    "+model=lofast_text_l3_h4",
    "data=sst2",
    "train.batch_size=2",
    "certify.enabled=false",
    "registry.enabled=false",
)
LOOK = (*TINY, "certify.enabled=true", "certify.images=20", "train.certify_images=32")

# rule -> (script, overrides, words of the refusal), on 2 ranks
Case = tuple[str, Sequence[str], str]
CASES: dict[str, list[Case]] = {
    "the_name_is_that_of_one_folder": [
        ("adv_train", [*TINY, "name=../../x", "run_dir=runs/x"], "not a valid folder name"),
        ("adv_train", [*TINY, "name=.hidden", "run_dir=runs/x"], "not a valid folder name"),
    ],
    "the_objective_exists": [("adv_train", [*TINY, "objective.name=nope"], "objective.name=nope")],
    "blurred_labels_suit_the_objective": [
        ("adv_train", [*TINY, "objective=mart", "mix.mixup=0.8"], "one class per image, but mix"),
        (
            "adv_train",
            [*TINY, "objective=lmce", "train.label_smoothing=0.1"],
            "train.label_smoothing gives probabilities",
        ),
        ("adv_train", [*CONV, "objective=gloro", "mix.cutmix=1"], "objective=clean"),
    ],
    "a_teacher_suits_the_objective": [
        ("adv_train", [*TINY, "objective=mart", "distill.teacher=teacher"], "use objective=clean|pgd_at|trades"),
    ],
    "the_teacher_takes_the_data": [
        ("adv_train", [*TINY, "distill.teacher=cert_vit_c10"], "distill.teacher=cert_vit_c10: data.img_size is 8"),
        (
            "adv_train",
            [*TINY, "distill.teacher=wide"],
            "teacher=wide: data.num_classes is 10, but dp_vit_ti has 7",
        ),
    ],
    "an_attack_on_probabilities_climbs_their_cross_entropy": [
        ("adv_train", [*TINY, "objective=trades", "attack.loss=margin"], "attack.loss=ce"),
        ("adv_train", [*TINY, "mix.mixup=1", "attack.loss=margin"], "attack.loss=ce"),
    ],
    "trades_starts_beside_the_image": [
        ("adv_train", [*TINY, "objective=trades", "attack.random_start=false"], "attack.random_start=true"),
    ],
    "attacks_suit_the_model": [
        ("std_train", [*TINY, "attack.loss=dlr", "model.num_classes=2"], "attack.loss=dlr needs three classes"),
        ("std_train", [*CONV, "attack.loss=attention"], "attack.loss=attention: ConvNet"),
        (
            "std_train",
            [*CONV, "certify.enabled=true", "certify.attack.loss=attention"],
            "certify.attack.loss=attention: ConvNet",
        ),
    ],
    "callbacks_exist": [("adv_train", [*TINY, "train.callbacks=[nope]"], "train.callbacks=nope does not exist")],
    "rows_for_mlflow_are_sent": [("adv_train", [*TINY, "train.log_to=[mlflow]"], "set registry.enabled=true")],
    "tags_are_not_reserved": [
        ("adv_train", [*TINY, "registry.tags={clean_acc:1.0}"], "clean_acc is reserved"),
        ("adv_train", [*TINY, "registry.tags={certified_acc.0.1:1.0}"], "certified_acc.0.1 is reserved"),
    ],
    "the_warm_up_ends": [
        ("adv_train", [*TINY, "schedule.warmup_epochs=1000"], "is the whole training (train.epochs="),
        ("constrain", [*CERTVIT, "schedule.warmup_epochs=3", "constrain.finetune_epochs=3"], "smaller one, or null"),
    ],
    "ranks_share_the_batch": [("adv_train", [*TINY, "train.batch_size=63"], "not a multiple of the 2 ranks")],
    "micro_batches_make_the_batch": [("adv_train", [*TINY, "train.micro_batch_size=5"], "train.micro_batch_size")],
    "images_make_a_batch": [("adv_train", [*TINY, "train.batch_size=4096"], "1437 training images")],
    "mixing_finds_pairs": [("adv_train", [*TINY, "mix.mixup=1", "train.batch_size=30"], "even")],
    "offloading_needs_optimiser_state_of_zero": [
        ("adv_train", [*TINY, "deepspeed=zero0", "deepspeed.offload_optimizer=true"], "deepspeed=zero1"),
    ],
    "muon_needs_whole_matrices": [
        ("adv_train", [*TINY, "optimizer=muon", "deepspeed=zero1"], "deepspeed=zero0"),
        ("adv_train", [*TINY, "optimizer=muon", "deepspeed=zero3"], "optimizer=adamw"),
    ],
    "the_average_needs_whole_weights": [
        ("adv_train", [*TINY, "deepspeed=zero3", "train.ema_decay=0.9"], "train.ema_decay=0"),
    ],
    "lipschitz_objectives_need_whole_weights": [
        ("adv_train", [*CONV, "objective=lmt", "deepspeed=zero3"], "use deepspeed=zero2"),
    ],
    "second_derivatives_need_whole_weights": [
        ("adv_train", [*TINY, "objective=lmce", "deepspeed=zero3"], "use deepspeed=zero2"),
    ],
    "sam_needs_whole_weights": [
        ("adv_train", [*TINY, "train.sam_rho=0.1", "deepspeed=zero3"], "use deepspeed=zero2"),
    ],
    "sam_needs_float32": [
        ("adv_train", [*TINY, "train.sam_rho=0.1", "train.precision=bf16"], "train.precision=fp32"),
    ],
    "what_is_compiled_runs_once_and_has_one_derivative": [
        ("adv_train", [*TINY, "train.compile=true", "train.grad_checkpointing=true"], "train.compile"),
        ("adv_train", [*TINY, "train.compile=true", "objective=lmce"], "objective=lmce"),
    ],
    "a_recomputed_block_has_one_derivative": [
        ("adv_train", [*TINY, "train.grad_checkpointing=true", f"objective={name}"], f"objective={name} takes two")
        for name in ("lmce", "emma", "curvature")
    ],
    "a_recomputed_block_draws_no_mask": [
        ("adv_train", [*TINY, "train.grad_checkpointing=true", "masks.ard=true"], "masks.ard"),
    ],
    "the_model_takes_the_data": [
        ("adv_train", [*TINY, "+model.img_size=12"], "data.img_size is 8, but dp_vit_ti takes 12"),
        ("adv_train", [*TINY, "+model.num_classes=7"], "data.num_classes is 10, but dp_vit_ti has 7 classes"),
    ],
    "the_model_can_be_built": [
        ("adv_train", [*TINY, "model.patch_size=16"], "img_size 8 is not a multiple of patch_size 16"),
        ("adv_train", [*TINY, "model.num_heads=3"], "width 32 is not a multiple of num_heads 3"),
    ],
    "text_has_its_objectives": [
        ("adv_train", [*TEXT, "objective=trades"], "objective=trades is not for text"),
        ("adv_train", [*TEXT, "deepspeed=zero3"], "use deepspeed=zero2 for text"),
        ("adv_train", [*TEXT, "train.grad_checkpointing=true"], "set them to 0, false or null for text"),
    ],
    "lipschitz_objectives_suit_the_model": [("adv_train", [*TINY, "objective=gloro"], "use a model conv_")],
    "recomputing_finds_blocks": [("adv_train", [*CONV, "train.grad_checkpointing=true"], "recomputes blocks")],
    "masks_find_attention_and_patches": [
        ("adv_train", [*CONV, "masks.ard=true"], "masks.ard=false"),
        ("adv_train", [*CONV, "masks.prm=true"], "masks.prm=false"),
    ],
    "penalties_find_weights": [
        ("adv_train", [*CONV, "penalty=msvp"], "use penalty=none"),
        ("adv_train", [*CONV, "hinge.weight=1", "hinge.q=1"], "(q); use hinge=none"),
        ("adv_train", [*TINY, "hinge.weight=1"], "(none); use hinge=none"),
    ],
    "certificates_have_rules_for_the_model": [
        ("adv_train", [*CERTVIT, UNTIED, "certify.enabled=true"], "certify.method=auto: NoRule(zoo.attention.l2"),
        ("adv_train", [*CERTVIT, UNTIED, "certify.enabled=true", "certify.method=best"], "certify.enabled=false"),
    ],
    "probes_exclude_reported_images": [
        ("adv_train", [*LOOK, "certify.images=340"], "set certify.images=328 or less"),
        ("adv_train", [*LOOK, "certify.images=null"], "set certify.images=328 or less"),
        ("adv_train", [*LOOK, "train.certify_images=400"], "set train.certify_images lower"),
    ],
    "probes_are_of_radii_in_the_norm": [
        ("adv_train", [*LOOK, "certify.norm=linf", "train.certify_eps=[8]"], "set train.certify_eps=0.03137 for 8/255"),
    ],
    "probes_need_unpatched_torch": [("adv_train", [*LOOK, "deepspeed=zero3"], "set it to 0, or use a stage below 3")],
    "there_are_weights_to_constrain": [("constrain", [*CERTVIT, "constrain.adapt_epochs=0"], "pretrained=WEIGHTS")],
    "the_product_has_rules_for_the_model": [("constrain", [*CERTVIT, UNTIED], "no product of norms")],
}
LISTED = [(rule, *case) for rule, cases in CASES.items() for case in cases]
FIRST = [(rule, *cases[0]) for rule, cases in CASES.items()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipe")
    certizoo.shards.__main__.main(["digits", str(folder / "data" / "digits")])
    save_teacher(folder / "teacher")
    save_teacher(folder / "wide", num_classes=7)
    for split in ("train", "test"):
        (folder / "s.tsv").write_text("sentence\tlabel\na fine film\t1\na dull one\t0\n")
        words = ["text", str(folder / "s.tsv"), str(folder / "data" / "sst2"), "--name=sst2", f"--split={split}"]
        certizoo.shards.__main__.main(words)
    return folder


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(folder)
    for key, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(key, value)
    return folder


def refusal(script: str, overrides: Sequence[str]) -> UserError:
    with pytest.raises(UserError) as caught:
        prepare_first(compose_config(script, ["name=refused", *overrides]))
    return caught.value


def test_every_rule_has_a_case() -> None:
    assert set(CASES) == {rule.__name__ for rule in (*RULES, *CONSTRAIN_RULES)}


@pytest.mark.parametrize(("rule", "script", "overrides", "words"), mostly_slow(LISTED, *FIRST[::3]))
def test_trainer_and_doctor_refuse_in_one_line_before_work(
    rule: str, script: str, overrides: Sequence[str], words: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sorted(here.rglob("*"))
    error = refusal(script, overrides)
    assert words in str(error)
    assert "\n" not in str(error)
    assert rule in [frame.name for frame in traceback.extract_tb(error.__traceback__)], "another rule was first"

    def started(*_: Any) -> None:
        raise AssertionError("a process group would have been started")

    monkeypatch.setattr(engine, "start", started)
    train = certvit.run if script == "constrain" else entry.train
    with pytest.raises(UserError) as caught:
        train(script, ["name=refused", *overrides])
    assert str(caught.value) == str(error)
    assert not dist.is_initialized()
    told = findings.configured([f"trainers/{script}.py", "name=refused", *overrides])
    assert told == [findings.Finding("configuration", str(error), False, mark="wrong")]
    assert sorted(here.rglob("*")) == before, "nothing is written"


@pytest.mark.parametrize(
    ("script", "overrides"),
    [("adv_train", TINY), ("std_train", [*CONV, "certify.enabled=true"]), ("constrain", CERTVIT)],
)
def test_what_goes_together_is_let_through(script: str, overrides: Sequence[str], here: Path) -> None:
    assert prepare_first(compose_config(script, [*overrides, "name=fine"])).data.name == "digits"


def test_certvit_checks_its_last_stage_before_its_first(here: Path) -> None:
    """Only stage 3 needs a certificate, and stage 2 makes its weights."""
    assert "certify.eps" in str(refusal("constrain", [*CERTVIT, "certify.enabled=true", "certify.eps=[]"]))


def test_layers_of_other_settings_are_refused_before_the_first_stage(here: Path) -> None:
    layers = here / "runs" / "layered" / "layers"
    layers.mkdir(parents=True)
    (layers / "settings.json").write_text("{}")
    with pytest.raises(UserError, match="made with other settings"):
        prepare_first(compose_config("constrain", [*CERTVIT, "name=layered", "resume=auto"]))


@pytest.mark.parametrize("name", ["spec_vit_digits", "cert_vit_c10", "lofast_vit_c10", "conv_4c3f_mnist", "dp_swin_t"])
def test_rules_see_the_model_that_is_trained(name: str) -> None:
    """It has the same modules and shapes, without memory. All models: tests/zoo/models."""
    with torch.device("meta"):
        model = zoo.create_model(name)
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"meta"}
    assert parts(model) == parts(zoo.create_model(name))


def parts(model: nn.Module) -> tuple[list[str], dict[str, torch.Size]]:
    types = [type(module).__name__ for module in model.modules()]
    return types, {key: value.shape for key, value in model.state_dict().items()}


# --- one place -------------------------------------------------------------------------------------------------------

GROUPS = "train|deepspeed|attack|objective|penalty|hinge|mix|masks|optimizer|schedule|model|constrain|certify|data"
OPTION = re.compile(rf"\b(?:{GROUPS})(?:\.\w+)?=")
LATE = (
    "engine",
    "weights",
    "steps",
    "techniques",
    "objectives",
    "certvit",
)  # sub-folders of code that runs after `prepare`


def late_refusals(source: str) -> list[str]:
    """Return messages about options in calls of `require` and `UserError`."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    refusing = [call for call in calls if ast.unparse(call.func).split(".")[-1] in ("require", "UserError")]
    return [text for call in refusing if OPTION.search(text := ast.unparse(call))]


def test_no_option_is_refused_late() -> None:
    for room in LATE:
        for path in (ROOT / "trainers" / room).glob("*.py"):
            assert late_refusals(path.read_text()) == [], path


def test_a_late_refusal_would_be_seen() -> None:
    assert late_refusals('require(rho == 0, f"train.sam_rho={rho} moves weights; use deepspeed=zero2")')
    assert late_refusals('raise settings.UserError("use deepspeed=zero2")')
    assert not late_refusals('raise UserError("a checkpoint could not be written; go on with resume=auto")')
