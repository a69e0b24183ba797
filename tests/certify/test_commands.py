"""`python -m certify` has eight commands, and none imports what only another command, or only its end, needs."""

import subprocess
import sys

from certify.__main__ import COMMANDS
from certizoo.config.compose import CONFIGS


def test_every_command_has_a_configuration_of_its_name() -> None:
    assert all((CONFIGS / f"{name}.yaml").is_file() for name in COMMANDS)


def test_figures_and_the_registry_are_loaded_when_they_are_needed() -> None:
    """Plotting, learning and publishing take seconds to import; a mistyped key is answered before."""
    code = (
        "import sys, certify.__main__, certify.stage.cli, certify.evaluation.cli; "
        "sys.exit(str({'matplotlib', 'sklearn', 'mlflow'} & set(sys.modules) or '') or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
