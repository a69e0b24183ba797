"""The keys that say what a command is about."""

from pathlib import Path

from certify.rows.arguments import handover_of
from zoo.weights.table import WEIGHTS


def test_a_run_names_its_handover(tmp_path: Path) -> None:
    """handover=runs/NAME is runs/NAME/handover, unless the folder itself is a hand-over."""
    own = tmp_path / "handover"
    own.mkdir()
    assert handover_of({"handover": str(tmp_path)}) == handover_of({"handover": str(own)}) == own
    (tmp_path / WEIGHTS).touch()
    assert handover_of({"handover": str(tmp_path)}) == tmp_path
