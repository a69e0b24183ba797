"""Names and passwords of an MLflow server: other processes get them by environment, and nothing is written with them.

A command line is shown to everybody on the machine (`ps`), and a configuration goes to MLflow itself.
"""

import os
import re

URI, BACKEND = "MLFLOW_TRACKING_URI", "MLFLOW_BACKEND_STORE_URI"
SECRETS = ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN")


def environment(uri: str) -> dict[str, str]:
    """What lets a process elsewhere reach `uri` as this one does."""
    return {URI: uri} | {key: os.environ[key] for key in SECRETS if key in os.environ}


def without(text: str) -> str:
    """The text, with no user name or password in the URIs that it quotes."""
    return re.sub(r"://[^/\s]*@", "://", text)
