"""trainers/constrain.py as a user runs it: three stages on 2 ranks; killed in stage 2, it resumes layer by layer."""

import json
import shutil
import time
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
import torch
from safetensors.torch import load_file, save_file

import zoo
from tests.tools.launching import ROOT, finish, launch

pytestmark = pytest.mark.slow

SIZES: dict[str, Any] = {"embed_dim": 32, "depth": 2, "num_heads": 2, "patch_size": 4}
TINY = (
    "+model=l2_certvit_mnist", *(f"model.{key}={value}" for key, value in SIZES.items()), "data=digits",
    "optimizer.lr=3e-3", "optimizer.lr_batch=null", "schedule.warmup_epochs=0.5", "train.batch_size=64",
    "train.eval_images=128",
    "registry.enabled=false", "certify.enabled=false", "constrain.batches=3", "constrain.batch_size=32",
)  # fmt: skip
SCRIPT = ROOT / "trainers" / "constrain.py"


@pytest.fixture(scope="module")
def folder(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("constrain")
    shutil.copytree(digits, folder / "data" / "digits")
    torch.manual_seed(0)
    model = zoo.create_model("l2_certvit_mnist", num_classes=10, img_size=8, in_chans=1, **SIZES)
    save_file(model.state_dict(), folder / "weights.safetensors")
    return folder


def run(folder: Path, *overrides: str) -> str:
    status, output = finish(launch(SCRIPT, *TINY, *overrides, cwd=folder), seconds=500)
    assert status == 0, output
    return output


def test_three_stages(folder: Path) -> None:
    stages = ("constrain.adapt_epochs=2", "constrain.finetune_epochs=1", "constrain.iterations=5", "constrain.passes=5")
    output = run(folder, *stages, "name=three")
    out = folder / "runs" / "three"
    report = json.loads((out / "constrained" / "report.json").read_text())
    assert report["product_after"] < report["product_before"]
    assert len(report["layers"]) == 12
    assert all(row["norm_after"] < row["norm_before"] for row in report["layers"])
    assert "product bound" in output
    model, _ = zoo.handover.load(out / "constrained")
    for row in report["layers"]:
        assert float((model.get_submodule(row["layer"]).get_parameter("weight") == 0).double().mean()) > 0.02
    assert (out / "finetune" / "handover" / "model.safetensors").is_file()
    again = finish(launch(SCRIPT, *TINY, *stages, "name=three", cwd=folder), seconds=100)
    assert again[0] == 2
    assert "resume=auto" in again[1]


def test_killed_in_stage_2_it_goes_on_to_an_equal_result(folder: Path) -> None:
    only = ("constrain.adapt_epochs=0", "constrain.finetune_epochs=0", "pretrained=weights.safetensors")
    steps = ("constrain.iterations=60", "constrain.passes=20", "constrain.rows=256")
    run(folder, *only, *steps, "name=whole")
    process = launch(SCRIPT, *TINY, *only, *steps, "name=killed", cwd=folder)
    layers = folder / "runs" / "killed" / "layers"
    for _ in range(3000):
        if len(list(layers.glob("*.safetensors"))) >= 2:
            break
        time.sleep(0.1)
    for one in [*psutil.Process(process.pid).children(recursive=True), process]:
        one.kill()
    process.communicate(timeout=100)
    done = {path.name: path.stat().st_mtime_ns for path in layers.glob("*.safetensors")}
    assert 2 <= len(done) < 12, "killed on the way"
    assert not (folder / "runs" / "killed" / "constrained").exists()
    run(folder, *only, *steps, "name=killed", "resume=auto")
    assert all((layers / name).stat().st_mtime_ns == time_ns for name, time_ns in done.items()), "none was made again"
    weights = [load_file(folder / "runs" / name / "constrained" / "model.safetensors") for name in ("whole", "killed")]
    assert all(torch.equal(value, weights[1][key]) for key, value in weights[0].items())
    status, output = finish(launch(SCRIPT, *TINY, *only, "name=killed", "resume=auto", cwd=folder), seconds=100)
    assert status == 0, "a finished run is left as it is"
    assert "product bound" not in output
