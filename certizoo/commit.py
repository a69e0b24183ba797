"""Which code made a result."""

import subprocess
from pathlib import Path


def git_commit() -> str:
    """The commit of the project, 'unknown' outside a checkout."""
    command = ["git", "-C", str(Path(__file__).resolve().parents[1]), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
