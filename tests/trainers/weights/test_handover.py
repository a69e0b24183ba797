"""The results of a shorter run that is extended are set aside together."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainers.weights import handover


def test_a_kill_between_the_renames_is_mended_by_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job: Any = SimpleNamespace(handover=tmp_path / "handover", run_dir=tmp_path)
    for name in ("handover", "certificate"):
        (tmp_path / name).mkdir()
    (tmp_path / "handover" / "metrics.json").write_text('{"step": 6}')
    rename = Path.rename

    def killed(path: Path, target: Path) -> None:
        rename(path, target)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            handover._set_aside(job, 12)
    handover._set_aside(job, 12)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["certificate_step00000006", "handover_step00000006"]
