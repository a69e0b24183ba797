"""Ray and Kubernetes accept the files in cluster/, and nothing listens on a port by default."""

import json
import re
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.tools.launching import ROOT


def test_ray_accepts_the_cluster_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check Ray's own schema and defaults from the project's folder, as `ray up cluster/ray.yaml` does."""
    from ray.autoscaler._private.util import fillout_defaults, validate_config

    monkeypatch.chdir(ROOT)
    config = yaml.safe_load((ROOT / "cluster" / "ray.yaml").read_text())
    validate_config(fillout_defaults(config))
    assert config["provider"] == {"type": "local", "head_ip": "127.0.0.1", "worker_ips": []}
    version = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("ray=="))
    assert f'rayVersion: "{version.removeprefix("ray==")}"' in (ROOT / "cluster" / "kuberay.yaml").read_text()


def test_the_image_holds_every_package() -> None:
    lines = (ROOT / "cluster" / "Containerfile").read_text().splitlines()
    copied = {line.split()[1] for line in lines if line.startswith("COPY ")}
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["include"]
    assert {package.removesuffix("*") for package in packages} <= copied


def test_the_image_has_what_kubernetes_asks_of_it() -> None:
    """It needs a valid name, wget and Ray's agents for the probes, and workers that start on demand."""
    lines = (ROOT / "cluster" / "Containerfile").read_text()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert " wget " in lines
    assert "-e '.[tune,cluster]'" in lines
    assert extras["cluster"][0].startswith("ray[default]")
    job = yaml.safe_load((ROOT / "cluster" / "kuberay.yaml").read_text())["spec"]["rayClusterSpec"]
    assert job["enableInTreeAutoscaling"]
    groups = [job["headGroupSpec"], *job["workerGroupSpecs"]]
    images = {one["image"] for group in groups for one in group["template"]["spec"]["containers"]}
    assert all(re.fullmatch(r"[a-z0-9.-]+(/[a-z0-9._-]+)*:[\w.-]+", image) for image in images)
    kept_out = (ROOT / ".dockerignore").read_text().split()
    copied = {line.split()[1] for line in lines.splitlines() if line.startswith("COPY ")}
    assert {".git", ".venv", "runs", "data"} <= set(kept_out)
    assert not copied & set(kept_out)


def test_the_dashboard_is_one_that_grafana_imports() -> None:
    """The import needs a title, a uid, separate places for panels, and the user's data source."""
    board = json.loads((ROOT / "cluster" / "grafana.json").read_text())
    assert {"title", "uid", "schemaVersion", "panels", "templating"} <= board.keys()
    places = [tuple(panel["gridPos"][key] for key in "xy") for panel in board["panels"]]
    assert len(set(places)) == len({panel["id"] for panel in board["panels"]}) == len(places)
    assert all(panel["datasource"]["uid"] == "${datasource}" and panel["targets"] for panel in board["panels"])
    variables = {one["name"] for one in board["templating"]["list"]}
    assert set(re.findall(r"\$\{?(\w+)", json.dumps(board))) <= variables


@pytest.mark.parametrize("path", sorted((ROOT / "cluster").rglob("*.yaml")), ids=lambda path: path.name)
def test_what_listens_beyond_the_loopback_asks_for_a_token_or_a_password(path: Path) -> None:
    text = path.read_text()
    assert yaml.safe_load(text)
    assert any(word in text for word in ("RAY_AUTH_MODE=token", "authOptions: {mode: token}", "ADMIN_PASSWORD:?"))
