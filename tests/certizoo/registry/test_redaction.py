"""Secrets of a configuration are neither written nor sent: the tests plant one in every place of it."""

import json
import logging
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from certify.stage import reproduce
from certify.stage.settings import Settings
from certizoo.config.compose import compose_config
from certizoo.registry.server import credentials, store
from certizoo.registry.tracking import run_folder
from certizoo.shards import DataConfig
from tests.tools import versions
from tests.tools.cases import mostly_slow
from tests.tools.tracking import AWAY, begin, runs_of

SECRET = "hunter2SECRETq9"
FORMS = {
    "password of a URI": f"https://me:{SECRET}@host:5000/x",
    "password with a slash": f"https://me:a/{SECRET}@host:5000/x",
    "password with an at": f"https://me:a@{SECRET}/b@host/x",
    "token of a URI": f"https://{SECRET}@host/x",
    "database": f"postgresql+psycopg://me:{SECRET}@host:5432/mlflow",
    "header in a command": f'pipe:curl -sH "Authorization: Bearer {SECRET}" https://host/{{shard}}',
    "option of a command": f"pipe:curl -u me:{SECRET} https://host/{{shard}}",
    "word of a command": f"pipe:fetch {SECRET} {{shard}}",
    "environment of a command": f"pipe:AWS_SECRET_ACCESS_KEY={SECRET} aws s3 cp s3://bucket/{{shard}} -",
    "signature of S3": f"https://host/{{shard}}?X-Amz-Credential={SECRET}&X-Amz-Signature={SECRET}&x=1",
    "signature of Azure": f"https://host/{{shard}}?sv=2024&sig={SECRET}",
    "token of a query": f"https://host/{{shard}}?token={SECRET}",
    "variable": f"export HF_TOKEN={SECRET}; x",
    "header": f"Authorization: Basic {SECRET}",
    "JSON": f'{{"api_key": "{SECRET}"}}',
    "two of a line": f"https://a:{SECRET}@h/x https://b:{SECRET}@h/y",
}


def every_leaf(config: Any, secret: str) -> Any:
    """Return the configuration with the text as every value, and in every list."""
    if isinstance(config, dict):
        return {key: every_leaf(value, secret) for key, value in config.items()} | {"added": [secret, {"x": secret}]}
    return secret


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    return compose_config("adv_train", ["+model=spec_vit_digits", "data=digits"])


def everything_below(folder: Path) -> list[Path]:
    """Return the files that contain the secret, databases included."""
    found = [path for path in folder.rglob("*") if path.is_file()]
    assert found
    return [path for path in found if SECRET.encode() in path.read_bytes()]


@pytest.mark.hostile
@pytest.mark.parametrize("form", mostly_slow(FORMS, *list(FORMS)[::4]))
def test_no_secret_of_a_configuration_leaves_the_process(
    store_in: str, tmp_path: Path, config: dict[str, Any], form: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Search MLflow's database and files, the run folder, the version, tags and log lines.

    The run folder's configuration is as somebody else may have written it; ours holds no secret.
    """
    planted = every_leaf(config, FORMS[form])
    with caplog.at_level(logging.DEBUG, logger="registry"):
        for uri in (store_in, AWAY):  # with a server, and without one
            begin(tmp_path / f"run-{uri[:4]}", uri, planted).finish()
        folder = versions.certified(tmp_path / "published")
        (folder / "config.yaml").write_text(yaml.safe_dump(credentials.redacted(planted)))
        versions.issue(folder, store_in, tags=credentials.redacted({"team": FORMS[form]}))
    assert {path.relative_to(tmp_path).as_posix() for path in everything_below(tmp_path)} == {
        f"run-{name}/{run_folder.CONFIG}" for name in ("sqli", "http")
    }
    assert SECRET not in caplog.text
    assert "data.root" in runs_of(store_in)[0].data.params, "the keys stay"


@pytest.mark.hostile
@pytest.mark.parametrize("key", ["password", "api_key", "AWS_SECRET_ACCESS_KEY", "hf_token", "awsSecretAccessKey"])
def test_a_key_named_like_a_secret_is_treated_as_one(key: str) -> None:
    assert credentials.redacted({"data": {key: SECRET, "n": [{key: SECRET}]}}) == {
        "data": {key: "***", "n": [{key: "***"}]}
    }


@pytest.mark.hostile
@pytest.mark.parametrize("form", FORMS)
def test_an_error_of_mlflow_quotes_no_secret(form: str) -> None:
    assert SECRET not in store.reason(Exception(f"request to {FORMS[form]} failed"))
    assert SECRET not in store.public(FORMS[form])


@pytest.mark.hostile
@pytest.mark.parametrize("form", FORMS)
def test_the_report_s_command_shows_no_secret(form: str) -> None:
    data = DataConfig("digits", FORMS[form], "a-*.tar", "b-*.tar", 10, 8, 1)
    assert SECRET not in reproduce.command(Path("handover"), {"model": {"name": "mine"}}, data, Settings())


@pytest.mark.parametrize(
    "text",
    ["s3://bucket/a@b", "runs/a@2", "data/digits", "https://host:5000/x", "sqlite:////tmp/a/mlflow.db", "mlp", "0.1",
     "https://host/a?x=1&y=2", "models:/tiny@champion"],
)  # fmt: skip
def test_what_is_no_secret_stays(text: str) -> None:
    assert credentials.redacted({"a": text}) == {"a": text}


@pytest.mark.hostile
@pytest.mark.parametrize(
    "text", ["token", "a://b:", "://", "pipe:", "a" * 5, "- ", "&token", "token   ", "authorization:", 'user="', "@:/"]
)
def test_long_texts_take_time_in_proportion_to_their_length(text: str) -> None:
    begun = time.process_time()
    credentials.without(text * (500_000 // len(text)))
    assert time.process_time() - begun < 5, "half a megabyte; anything quadratic takes minutes"


def test_a_configuration_without_secrets_is_unchanged(config: dict[str, Any]) -> None:
    """No ordinary value is taken for a secret."""
    assert json.loads(json.dumps(credentials.redacted(config))) == json.loads(json.dumps(config))


def test_the_trainer_writes_redacted_configurations_alone() -> None:
    """Check each place that writes a whole configuration."""
    root = Path(store.__file__).parents[2]
    found = subprocess.run(
        ["grep", "-rnE", r"safe_dump\(job\.config|in job\.config\.items", "--include=*.py", "trainers", "tuning"],
        cwd=root, capture_output=True, text=True,
    ).stdout  # fmt: skip
    assert [line for line in found.splitlines() if "redacted" not in line] == []
