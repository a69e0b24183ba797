"""The whole path of a user: shards, 2 ranks under the launcher, certificates, the registry, and back."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import certizoo.shards.__main__
import zoo
from certizoo.registry import browse
from certizoo.registry.server import store
from certizoo.registry.tracking import run_folder, runs
from tests.tools.launching import ROOT, environment, finish, launch

SCRIPT = ROOT / "trainers" / "adv_train.py"


@pytest.mark.slow  # the connections alone, without a launcher: the test below
def test_from_shards_to_the_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`make demo` with a quarter of its epochs and a fifteenth of its images, then load the registered version."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CERTIZOO_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    certizoo.shards.__main__.main(["digits", "data/digits"])
    arguments = ("+model=spec_vit_digits", "data=digits", "name=demo", "train.epochs=10", "certify.images=24")
    status, output = finish(launch(SCRIPT, *arguments, "registry.champion_images=24", cwd=tmp_path), seconds=240)
    assert status == 0, output
    assert "spec_vit_digits version 1 (champion)" in output
    certificate = registered(24)
    assert certificate["clean"] > 0.6
    assert certificate["accuracy"]["0.05"]["certified"] > 0.1, "hardly anything is certified after a short training"


def test_two_steps_of_one_process_get_into_the_registry(store_in: str, tmp_path: Path, digits: Path) -> None:
    arguments = ("+model=spec_vit_digits", "data=digits", f"data.root={digits}", "name=demo", "train.max_steps=2",
                 "train.eval_images=20", "certify.images=4", "certify.method=lofast",
                 "registry.champion_images=4")  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], cwd=tmp_path, env=environment(), text=True, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    assert "spec_vit_digits version 1 (champion)" in done.stdout + done.stderr
    registered(4)
    (version,) = browse.versions("spec_vit_digits")
    client = store.connect(store_in)
    run = client.get_run(version.run_id or "")
    assert run.info.status == "FINISHED"
    assert (run.data.params["name"], run.data.params["train.max_steps"]) == ("demo", "2")
    assert {"loss", "clean_acc", "images_per_s", "system/cpu_utilization_percentage"} <= run.data.metrics.keys()
    assert {file.path for file in client.list_artifacts(run.info.run_id)} == {"handover", "pictures"}
    assert run_folder.below(tmp_path) == [tmp_path / "runs" / "demo"]
    assert not runs.waiting(tmp_path / "runs" / "demo")


def registered(images: int) -> dict[str, Any]:
    """Check that the certificate of the run `demo` has the figures of its version and the trained weights."""
    certificate = dict(json.loads(Path("runs/demo/certificate/certificate.json").read_text()))
    rows = pd.read_parquet("runs/demo/certificate/certificates.parquet")
    assert len(rows) == images
    (version,) = browse.versions("spec_vit_digits")
    assert version.tags["certified_acc.0.1"] == f"{certificate['accuracy']['0.1']['certified']:.4f}"
    assert version.tags["penalty"] == "msvp"
    served, _ = zoo.handover.load(browse.download("spec_vit_digits@champion"))
    trained, _ = zoo.handover.load(Path("runs/demo/handover"))
    x = torch.rand(32, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(served(x), trained(x))
    return certificate


@pytest.mark.slow
def test_a_model_of_zero_3_is_certified_in_the_process_that_trained_it(tmp_path: Path, digits: Path) -> None:
    """There DeepSpeed replaces torch's linear function until the training stops."""
    arguments = ("+model=spec_vit_digits", "data=digits", f"data.root={digits}", "name=z3", "deepspeed.stage=3",
                 "train.epochs=1", "train.eval_images=20", "certify.images=4", "registry.enabled=false")  # fmt: skip
    status, output = finish(launch(SCRIPT, *arguments, cwd=tmp_path), seconds=240)
    assert status == 0, output
    certificate = json.loads((tmp_path / "runs" / "z3" / "certificate" / "certificate.json").read_text())
    assert certificate["images"] == 4
