"""Libraries that the core of the package does without, and the extra of pyproject.toml that installs each."""

EXTRAS = {
    "aiohttp": "evaluate",
    "deepspeed": "train",
    "fsspec": "evaluate",
    "matplotlib": "evaluate",
    "mlflow": "registry",
    "optuna": "tune",
    "packaging": "train",
    "pandas": "evaluate",
    "psutil": "train",
    "pyarrow": "evaluate",
    "pyautoattack": "evaluate",
    "ray": "tune",
    "sklearn": "evaluate",
    "sqlalchemy": "registry",
    "tensorboard": "log",
    "tokenizers": "evaluate",
    "wandb": "log",
    "webdataset": "evaluate",
}


def advice(library: str) -> str:
    """Return the command that installs a library of EXTRAS."""
    return f"pip install 'certizoo[{EXTRAS[library]}]'"
