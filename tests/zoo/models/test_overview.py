"""`python -m zoo`: sizes and cost against formulas and published figures, provability, and the command line."""

import csv
import io
import json

import pytest
import torch

from certizoo import UserError
from tests.tools.cases import mostly_slow
from zoo import list_models
from zoo.__main__ import main
from zoo.models import overview


def test_cost_of_a_vit_by_its_formula() -> None:
    """Count multiply-adds of one image: N D P for patches, 12 N D^2 + 2 N^2 D for each block, D K for the head."""
    row = overview.summarize("dp_vit_b")
    n, d, patches = 197, 768, 196
    assert row.macs == patches * d * 3 * 16**2 + 12 * (12 * n * d**2 + 2 * n**2 * d) + 1000 * d
    assert (row.parameters, row.tokens, row.image, row.backbone) == (86_567_656, 197, "3x224x224", "vit")


def test_published_costs() -> None:
    """GMACs of Liu et al. 2021, Table 1 (Swin-T 4.5), and of Touvron et al. 2021 (DeiT-S 4.6)."""
    swin, deit = overview.summarize("dp_swin_t"), overview.summarize("dp_deit_s")
    assert f"{swin.macs / 1e9:.1f}" == "4.5"
    assert f"{deit.macs / 1e9:.1f}" == "4.6"
    assert swin.tokens == 56 * 56
    assert overview.summarize("dp_convit_ti").backbone == "convit"
    assert overview.summarize("dp_convit_ti").tokens == 197


def test_caps_cost_nothing_when_served() -> None:
    free = {"attention": "dp", "patch_cap": None}
    capped = overview.summarize("lofast_vit_c10")
    assert capped.macs == overview.summarize("lofast_vit_c10", **free).macs
    assert capped.parameters == overview.summarize("lofast_vit_c10", **free).parameters


def test_weights_of_a_large_model_are_never_allocated() -> None:
    model = overview.on_meta("dp_vit_l")
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"meta"}


def test_rules_are_really_tried() -> None:
    """The verdict is that of `zoo.rules` on the model's own parts, with its reason."""
    assert overview.lofast_refusal("dp_vit_l") == ""
    assert overview.lofast_refusal("l2_vit_b") == ""
    untied = overview.lofast_refusal("l2_vit_b", attention={"name": "l2", "tied": False})
    assert untied.startswith("NoRule(zoo.attention.l2")
    assert overview.summarize("dp_vit_ti").record()["lofast"] is True
    assert overview.summarize("l2_swin_t").record()["adjoint"] is True


def test_trying_rules_leaves_the_random_stream_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    overview.lofast_refusal("dp_vit_ti")
    assert torch.equal(torch.rand(4), expected)


def test_every_stored_summary_is_of_a_model() -> None:
    assert {record["name"] for record in json.loads(overview.MEASURED.read_text())} <= set(list_models())


@pytest.mark.parametrize("name", mostly_slow(list_models(), "dp_vit_ti", "lofast_vit_c10"))
def test_stored_figures_are_those_of_the_code(name: str) -> None:
    """If not, run `python -m zoo --measure --format json > summaries.json` and move the file to zoo/models."""
    assert name in {record["name"] for record in json.loads(overview.MEASURED.read_text())}
    assert overview.summary(name) == overview.summarize(name)


# --- the command line ------------------------------------------------------------------------------------------------


def test_csv_and_json_say_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    main(["dp_deit_*", "--format", "csv"])
    table = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    main(["dp_deit_*", "--format", "json"])
    records = json.loads(capsys.readouterr().out)
    assert (
        [row["name"] for row in table] == [row["name"] for row in records] == ["dp_deit_b", "dp_deit_s", "dp_deit_ti"]
    )
    assert all(int(row["parameters"]) == record["parameters"] for row, record in zip(table, records, strict=True))
    assert records[0]["lofast"] is True
    assert records[0]["tokens"] == 197


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    main(["dp_vit_b"])
    shown = capsys.readouterr().out
    for word in ("86.57", "17.6", "197", "3x224x224", "multiply-adds", "yes"):
        assert word in shown, word


def test_show(capsys: pytest.CaptureFixture[str]) -> None:
    main(["show", "dp_vit_b"])
    shown = capsys.readouterr().out
    for word in (
        "86,567,656",
        "0-11 (12x): PreNormBlock",
        "-> (1, 197, 768)",
        "mlp_ratio",
        "zoo.layers.mlp.Mlp",
        "lofast: yes",
        "adjoint: yes",
    ):
        assert word in shown, word
    assert shown.count("PreNormBlock()") == 1


def test_show_with_other_options(capsys: pytest.CaptureFixture[str]) -> None:
    main(["show", "l2_vit_ti", "--set", "depth=3", "attention={name: l2, tied: false}"])
    shown = capsys.readouterr().out
    assert "0-2 (3x)" in shown
    assert "lofast: no: NoRule(" in shown


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (["dp_vit_t"], "dp_vit_ti"),
        (["*swim*"], "(all: python -m zoo)"),
        (["certvit"], "l2_certvit_c10"),
        (["show", "dp_vit_bb"], "dp_vit_b"),
        (["show", "dp_vit_b", "--set", "dept=2"], "depth"),
        (["show", "dp_vit_b", "--set", "depth"], "option=value"),
        (["show", "dp_vit_b", "--set", "attention={name"], "YAML"),
    ],
)
def test_errors_are_one_line(words: list[str], fix: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert fix in error


def test_no_match_is_a_user_error() -> None:
    with pytest.raises(UserError, match="no model fits"):
        overview.matching("nothing")
