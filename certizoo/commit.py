"""Identify the code that made a result."""

import hashlib
import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODELS = ("certizoo/*.py", "zoo/**/*.py", "certify/served.py")  # sources from which a published model is built


def git_commit() -> str:
    """Return the commit of the project, 'unknown' outside a checkout."""
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


@cache
def code_sha256() -> str:
    """Return the digest of the source that builds models, as it is on disk: a commit does not show local changes."""
    digest = hashlib.sha256()
    for file in (file for pattern in MODELS for file in sorted(ROOT.glob(pattern))):
        content = file.read_bytes()
        digest.update(f"{file.relative_to(ROOT).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()
