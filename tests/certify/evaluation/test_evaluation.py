"""The evaluation on real files: nested outcomes, the same for any batch size, resumed, refuted and published."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlflow
import pandas as pd
import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

import zoo
from certify import api
from certify.__main__ import main
from certify.evaluation import evaluate_block, refuted, robustbench
from certify.evaluation import run as evaluation
from certify.shared.certificate import UnsoundCertificate
from certify.stage import register
from certify.stage import run as stage
from certizoo import UserError
from certizoo.attacks import AttackConfig
from certizoo.attacks.attack import Attack, Draws
from certizoo.attacks.auto import AutoAttack
from certizoo.attacks.kinds import KINDS
from certizoo.attacks.norms import distance
from certizoo.locks import HOLDER, LOCK
from certizoo.registry import browse
from tests.tools.full_disk import full_disk
from tests.tools.rounding import assert_same_to_rounding
from tests.tools.stage_runs import SETTINGS as FEW
from tests.tools.stage_runs import data

PGD: Mapping[str, Mapping[str, object]] = {
    "pgd_l2": {"kind": "pgd", "norm": "l2", "eps": 0.1, "steps": 10, "loss": "margin"},
    "pgd_ce": {"kind": "pgd", "norm": "l2", "eps": 0.1, "steps": 3},
    "pgd_linf": {"kind": "pgd", "norm": "linf", "eps": 8 / 255, "steps": 5},
}
ATTACKS = {**PGD, "noise": {"kind": "noise"}}
SETTINGS = evaluation.Settings("test", ATTACKS, method="lofast", images=40, block=20, batch_size=20, check_images=0)
FLOAT32 = 1e-4  # logits differ by about 1e-7, the points of ten attack steps by about 1e-6 of their length
TIMES = ("seconds.certify", *(f"seconds.{name}" for name in ATTACKS))


@dataclass(frozen=True)
class Noise:
    """An attack that draws once for all images of a call, as AutoAttack does, so that outcomes depend on the block."""

    norm: str = "l2"
    eps: float = 3.0
    together: bool = True

    def require_model(self, model: nn.Module, classes: int, side: int) -> None:
        """Work on any model."""

    def run(self, model: nn.Module, images_BCHW: Tensor, labels_B: Tensor, draws: Draws = None) -> Tensor:
        noise = torch.randn(images_BCHW.shape, generator=torch.Generator().manual_seed(0))
        return (images_BCHW + self.eps * noise / noise.flatten(1).norm(dim=1).view(-1, 1, 1, 1)).clamp(0, 1)


@pytest.fixture(autouse=True, scope="module")
def _noise_is_a_kind() -> Iterator[None]:
    KINDS["noise"] = Noise
    yield
    del KINDS["noise"]


def rows(out: Path) -> pd.DataFrame:
    return pd.read_parquet(out / evaluation.TABLE).drop(columns=list(TIMES))


@pytest.fixture(scope="module")
def whole(handover: Path, digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole")
    evaluation.run(handover, data(digits), SETTINGS, out)
    return out


def test_certified_survives_and_survivors_are_correct(whole: Path) -> None:
    table, summary = pd.read_parquet(whole / evaluation.TABLE), json.loads((whole / evaluation.EVALUATION).read_text())
    assert len(table) == 40 == table["key"].nunique()
    for name, of in summary["accuracy"].items():
        assert (table[f"certified.{name}"] <= table[f"survives.{name}"]).all()
        assert (table[f"survives.{name}"] <= table["correct"]).all()
        assert of["accuracy"] == table[f"survives.{name}"].mean()
        assert of["interval"][0] <= of["accuracy"] <= of["interval"][1]
        broken = table["correct"] & ~table[f"survives.{name}"]
        assert (table[f"l2.{name}"].notna() == broken).all()
    assert summary["found_within_certified_radius"] == 0
    assert summary["clean"] > 0.5
    assert 0 < summary["accuracy"]["pgd_l2"]["certified"]["accuracy"] < summary["clean"], "nothing to compare"
    assert summary["worst_case"][0]["attacks"] == ["pgd_l2", "pgd_ce"]
    assert summary["worst_case"][0]["accuracy"] <= min(summary["accuracy"][k]["accuracy"] for k in ("pgd_l2", "pgd_ce"))
    for name in (evaluation.CARD, evaluation.BARS, "evaluation.csv"):
        assert (whole / name).stat().st_size > 0


def test_a_linf_ball_is_certified_by_the_l2_ball_around_it(whole: Path) -> None:
    table = pd.read_parquet(whole / evaluation.TABLE)
    assert (table["certified.pgd_linf"] == (table["radius.lofast"] >= 8 / 255 * 8 * (1 + 1e-12))).all()


def test_outcomes_do_not_depend_on_the_batch(handover: Path, digits: Path, whole: Path, tmp_path: Path) -> None:
    evaluation.run(handover, data(digits), replace(SETTINGS, batch_size=7), tmp_path)
    assert_same_to_rounding(rows(tmp_path), rows(whole), FLOAT32)


@pytest.mark.slow
def test_outcomes_do_not_depend_on_the_workers(handover: Path, digits: Path, whole: Path, tmp_path: Path) -> None:
    evaluation.run(handover, data(digits), replace(SETTINGS, attacks=PGD, workers=2), tmp_path)
    two = pd.read_parquet(tmp_path / evaluation.TABLE).filter(regex="^(?!seconds)")
    assert_same_to_rounding(two, rows(whole)[list(two.columns)], FLOAT32)


def test_images_keep_their_random_numbers_in_other_blocks(
    handover: Path, digits: Path, whole: Path, tmp_path: Path
) -> None:
    """Attacks that draw once for a whole block are the exception."""
    evaluation.run(handover, data(digits), replace(SETTINGS, block=13), tmp_path)
    table = pd.read_parquet(tmp_path / evaluation.TABLE)
    columns = ["survives.pgd_l2", "l2.pgd_l2", "survives.pgd_linf", "l2.pgd_linf"]
    assert_same_to_rounding(table[columns], rows(whole)[columns], FLOAT32)
    evaluation.run(handover, data(digits), replace(SETTINGS, seed=1), tmp_path / "seed")
    other = pd.read_parquet(tmp_path / "seed" / evaluation.TABLE)
    assert not table["l2.noise"].equals(rows(whole)["l2.noise"])
    assert not other["l2.pgd_linf"].equals(table["l2.pgd_linf"]), "the seed decides nothing"


def test_a_start_that_was_cut_off_goes_on_at_a_block(handover: Path, digits: Path, whole: Path, tmp_path: Path) -> None:
    evaluation.run(handover, data(digits), SETTINGS, tmp_path)
    lines = (tmp_path / evaluation.ROWS).read_text().splitlines(keepends=True)
    (tmp_path / evaluation.ROWS).write_text("".join(lines[:25]) + lines[25][:40])  # killed in the middle of a line
    (tmp_path / evaluation.EVALUATION).unlink()
    done: list[int] = []
    evaluation.run(handover, data(digits), SETTINGS, tmp_path, progress=lambda now, total: done.append(now))
    assert done == [20, 40]
    pd.testing.assert_frame_equal(rows(tmp_path), rows(whole), rtol=1e-9)
    with pytest.raises(UserError, match="another seed"):
        evaluation.run(handover, data(digits), replace(SETTINGS, seed=7), tmp_path)


def test_an_unsound_certificate_is_caught_with_its_image(
    handover: Path, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The planted radii are 20 times too large."""
    monkeypatch.setattr(evaluate_block, "radius_of", lambda analysis: 20 * api.radius_of(analysis))
    with pytest.raises(UnsoundCertificate, match="certificate is wrong"):
        evaluation.run(handover, data(digits), SETTINGS, tmp_path)
    (path,) = (tmp_path / "refuted").iterdir()
    model = robustbench.load_model(str(handover))
    with safe_open(path, "pt") as file:
        image, found, facts = file.get_tensor("image"), file.get_tensor("adversarial"), file.metadata()
    l2 = float(distance(found[None], image[None], "l2"))
    assert l2 == pytest.approx(float(facts["l2"]), rel=1e-12)  # computed there in a batch, here for one image
    assert float(facts["l2"]) <= float(facts["certified_radius"])
    answers: Tensor = model(torch.stack([image, found])).argmax(1)
    assert answers[0] == int(facts["label"]) != answers[1]

    with pytest.raises(SystemExit):
        main(
            [
                "evaluate",
                f"handover={handover}",
                f"out={tmp_path / 'again'}",
                "images=40",
                "check_images=0",
                "method=lofast",
            ]
        )
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "certificate is wrong" in error


def test_the_command_prints_a_table_and_the_warnings(
    handover: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["evaluate", f"handover={handover}", f"out={tmp_path}", "images=4", "check_images=2", "method=null"]
    main(command)
    out = capsys.readouterr().out
    assert "quick" in out
    assert "clean" in out
    assert "certified.quick" not in (tmp_path / evaluation.ROWS).read_text()
    summary = json.loads((tmp_path / evaluation.EVALUATION).read_text())
    assert summary["method"] is None
    assert all(of["certified"] is None for of in summary["accuracy"].values())
    assert out.count("warning:") == len(summary["flags"])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"block": 0}, "block=0"),
        ({"device": "tpu"}, "device='tpu'"),
        ({"attack_dtype": "float16"}, "attack_dtype='float16'"),
        ({"attacks": {}}, "no attacks"),
    ],
    ids=str,
)
def test_senseless_settings_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        replace(SETTINGS, **changes)


def test_a_full_disk_hides_no_wrong_certificate(tmp_path: Path) -> None:
    found = refuted.Found("k", torch.zeros(1, 2, 2), torch.ones(1, 2, 2), 1, "pgd", "l2", 0.1, 0.2)
    with full_disk(tmp_path, 1), pytest.raises(UnsoundCertificate, match=r"could not be written \(File too large"):
        refuted.refuse(found, tmp_path)
    with pytest.raises(UnsoundCertificate, match="Both images are in"):
        refuted.refuse(found, tmp_path)


@pytest.mark.parametrize(
    "options", [{"kind": "fgms"}, {"kind": "pgd", "epsilon": 1}, {"kind": "transfer", "source": "away"}], ids=str
)
def test_a_wrong_entry_is_named(handover: Path, digits: Path, tmp_path: Path, options: dict[str, object]) -> None:
    with pytest.raises(UserError, match=r"protocol\.attacks\.mine"):
        evaluation.run(handover, data(digits), replace(SETTINGS, attacks={"mine": options}), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} <= {LOCK, HOLDER}


def test_transfer_finds_its_points_on_the_other_model(handover: Path, digits: Path, tmp_path: Path) -> None:
    """A transfer from the model itself equals the attack; one from other weights is weaker."""
    torch.manual_seed(1)
    config = zoo.handover.read_config(handover)
    zoo.handover.save(tmp_path / "other", zoo.create_model(**config["model"]), config["model"], {})
    attack = {"kind": "pgd", "norm": "linf", "eps": 0.1, "steps": 10}
    attacks: Mapping[str, Mapping[str, object]] = {
        "own": attack,
        "same": {"kind": "transfer", "source": str(handover), "attack": attack},
        "other": {"kind": "transfer", "source": str(tmp_path / "other"), "attack": attack},
    }
    evaluation.run(handover, data(digits), replace(SETTINGS, attacks=attacks, method=None), tmp_path / "out")
    table = pd.read_parquet(tmp_path / "out" / evaluation.TABLE)
    assert (table["survives.own"] == table["survives.same"]).all()
    assert table["survives.other"].mean() > table["survives.own"].mean()


@pytest.mark.slow
def test_a_published_version_gets_the_figures_as_tags_and_metrics(
    handover: Path, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CERTIZOO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    stage.run(handover, data(digits), replace(FEW, images=20), tmp_path / "out")
    register.publish(handover, tmp_path / "out", registered_name="digits", experiment="test", champion_images=20)
    command = ["evaluate", "version=digits@champion", f"out={tmp_path / 'evaluation'}", "images=20", "check_images=0"]
    main(command)
    summary = json.loads((tmp_path / "evaluation" / evaluation.EVALUATION).read_text())
    (version,) = browse.versions("digits")
    assert version.tags["flags.quick"] == "none"
    for name, of in summary["accuracy"].items():
        assert float(version.tags[f"attacked_acc.quick.{name}"]) == pytest.approx(of["accuracy"], abs=1e-4)
        assert float(version.tags[f"proved_acc.quick.{name}"]) == pytest.approx(of["certified"]["accuracy"], abs=1e-4)
    assert version.tags["clean_acc"], "the certificate's own tags stay"
    run = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db").get_run(version.run_id or "")
    assert {f"attacked_acc.quick.{name}" for name in summary["accuracy"]} <= set(run.data.metrics)


def test_only_the_whole_autoattack_is_a_leaderboard_entry(whole: Path) -> None:
    summary = json.loads((whole / evaluation.EVALUATION).read_text())
    attacks: dict[str, Attack] = {
        "aa": AutoAttack(norm="linf", eps=8 / 255),
        "apgd": AutoAttack(norm="linf", eps=8 / 255, attacks=("apgd-ce",)),
        "hasty": AutoAttack(norm="linf", eps=8 / 255, queries=100),
        "pgd_l2": AttackConfig(norm="l2", eps=0.5),
    }
    summary["accuracy"] |= {"aa": {"accuracy": 0.4321}, "apgd": {"accuracy": 0.5}, "hasty": {"accuracy": 0.6}}
    ((threat, entry),) = robustbench.entries(summary, attacks)
    assert threat == "Linf"
    assert entry["eps"] == "8/255"
    assert entry["autoattack_acc"] == "43.21"
    assert entry["clean_acc"] == f"{100 * summary['clean']:.2f}"
    assert entry["unreliable"] is False


def test_the_leaderboard_takes_the_model_from_the_folder(handover: Path) -> None:
    """RobustBench expects images in [0,1] -> logits, in eval mode, without gradients for weights."""
    model = robustbench.load_model(str(handover))
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert model(torch.rand(2, 1, 8, 8)).shape == (2, 10)
