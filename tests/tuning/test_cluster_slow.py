"""The user's commands to the letter: `ray up`, `ray submit cluster/ray.yaml tune.py --space msvp`, `ray down`.

All of it runs in namespaces of its own: a network that is only a loopback, with its own sshd on port 22; its own
processes (`ray stop` ends every Ray process that it sees), its own /tmp/ray, and a home folder of the test.
cluster/ray.yaml is used as it is. The environment of the nodes is this test's, linked, so that nothing is downloaded.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from certizoo.registry import browse
from tests.tools.launching import ROOT
from tests.tools.tuning_runs import certified, runs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

NEEDED = ("unshare", "ip", "rsync", "ssh", "/usr/sbin/sshd")
INSIDE = r"""
set -eu
ip link set lo up
sed "s,^root:.*,root:x:0:0:root:$HOME:/bin/bash," /etc/passwd > "$WORK/passwd"
mount --bind "$WORK/passwd" /etc/passwd
mkdir -p /tmp/ray "$WORK/ray" /run/sshd
mount --bind "$WORK/ray" /tmp/ray
ssh-keygen -q -t ed25519 -N '' -f "$HOME/.ssh/id_ed25519"
cp "$HOME/.ssh/id_ed25519.pub" "$HOME/.ssh/authorized_keys"
ssh-keygen -q -t ed25519 -N '' -f "$WORK/host_key"
printf '%s\n' 'ListenAddress 127.0.0.1' "HostKey $WORK/host_key" 'StrictModes no' 'PidFile none' > "$WORK/sshd_config"
/usr/sbin/sshd -f "$WORK/sshd_config" -E "$WORK/sshd.log"
cd "$PROJECT"
ray up -y cluster/ray.yaml
ray submit cluster/ray.yaml tune.py --space msvp --num-samples 2 --scheduler none train.epochs=4 certify.images=40 \
  registry.champion_images=40
if ray submit cluster/ray.yaml tune.py --space nonsense; then echo "SUBMIT HID A FAILURE"; fi
grep -c . "$HOME/.ray/auth_token"
if env -u RAY_AUTH_MODE -u RAY_AUTH_TOKEN HOME="$WORK/stranger" RAY_AUTH_MODE=disabled python "$WORK/join.py"
then echo "A STRANGER WAS LET IN"; fi
ray down -y cluster/ray.yaml
"""
JOIN = "import ray; ray.init(address='127.0.0.1:6379', log_to_driver=False); print(ray.nodes())"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Make a node's home folder with nothing but the environment, so that ray.yaml finds it installed."""
    missing = [tool for tool in NEEDED if shutil.which(tool) is None]
    if os.geteuid() != 0 or missing:
        pytest.skip(f"needs root for namespaces, and {', '.join(missing) or 'nothing else'}")
    home, venv = tmp_path / "home", tmp_path / "home" / "certizoo" / ".venv"
    venv.mkdir(parents=True)
    (home / ".ssh").mkdir(mode=0o700)
    (tmp_path / "stranger").mkdir()
    (tmp_path / "join.py").write_text(JOIN)
    for entry in Path(sys.prefix).iterdir():
        (venv / entry.name).symlink_to(entry)
    (venv / "cluster").unlink(missing_ok=True)
    (venv / "cluster").write_text("".join((ROOT / name).read_text() for name in ("pyproject.toml", "constraints.txt")))
    return home


def test_up_submit_down(home: Path) -> None:
    environment = {
        "HOME": str(home), "WORK": str(home.parent), "PROJECT": str(ROOT), "LANG": "C.UTF-8", "TERM": "dumb",
        "PATH": f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin",
    }  # fmt: skip
    command = ["unshare", "--pid", "--fork", "--mount", "--uts", "--net", "--mount-proc", "--kill-child=KILL"]
    log = home.parent / "cluster.log"
    with log.open("w") as out:
        done = subprocess.run([*command, "bash", "-c", INSIDE], env=environment, stdout=out, stderr=out, timeout=1500)
    said = log.read_text()
    assert done.returncode == 0, said[-6000:]
    assert "no space 'nonsense'; nearest: " in said
    assert "SUBMIT HID A FAILURE" not in said
    assert "A STRANGER WAS LET IN" not in said
    project = home / "certizoo"
    (search,) = (project / "runs" / "tune").iterdir()
    versions = browse.versions("spec_vit_digits", f"sqlite:///{project}/mlflow.db")
    assert {v.tags["trial"] for v in versions} == {f"{search.name}/{trial}" for trial in runs(search)}
    assert len(versions) == 2
    best = max(certified(search / "trials" / trial / names[-1], "0.1") for trial, names in runs(search).items())
    (champion,) = [v for v in versions if "champion" in v.aliases]
    assert float(champion.tags["certified_acc.0.1"]) == pytest.approx(best, abs=1e-4)
    assert (search / "pareto.png").is_file()
