"""Trainings as on a cluster: two hosts by a hostfile, weights cut over ranks up to the hand-over, compiled."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from safetensors.torch import load_file

import zoo
from certizoo.ports import free_port
from tests.tools import zero_runs
from tests.tools.launching import ROOT, TINY, environment, finish, launch, ranks, reach, rows

pytestmark = pytest.mark.slow
SCRIPT = ROOT / "trainers" / "adv_train.py"
SHARDED = ("deepspeed=zero3", "deepspeed.persistent_below=0", "deepspeed.live_parameters=0")
HOSTS = ("127.0.0.1", "127.0.0.2")


def where(program: str) -> str | None:
    return shutil.which(program, path=os.environ["PATH"] + ":/usr/sbin")


MISSING = [program for program in ("sshd", "ssh-keygen", "pdsh") if where(program) is None]


@contextmanager
def hosts(folder: Path, port: int) -> Iterator[None]:
    """Run an sshd with its own keys for every address, and make ssh find them by `ssh_arguments`."""
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-qt", "ed25519", "-N", "", "-f", str(folder / name)], check=True, timeout=30)
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # required by sshd as root
    daemons = []
    try:
        for address in HOSTS:
            settings = {
                "ListenAddress": f"{address}:{port}", "HostKey": folder / "host", "PidFile": folder / address,
                "AuthorizedKeysFile": folder / "user.pub", "StrictModes": "no", "UsePAM": "no",
                "PasswordAuthentication": "no",
            }  # fmt: skip
            options = [word for key, value in settings.items() for word in ("-o", f"{key}={value}")]
            daemons.append(subprocess.Popen([str(where("sshd")), "-D", "-e", "-f", "/dev/null", *options]))
        yield
    finally:
        for daemon in daemons:
            daemon.terminate()
            daemon.wait(timeout=10)


def ssh_arguments(folder: Path) -> str:
    return f"-i {folder}/user -F none -o StrictHostKeyChecking=no -o UserKnownHostsFile={folder}/known"


@pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
def test_two_hosts_of_a_hostfile_run_one_training(folder: Path) -> None:
    port = free_port()
    (folder / "hostfile").write_text("# two hosts\n" + "".join(f"{host} slots=1\n" for host in HOSTS))
    (folder / ".deepspeed_env").write_text("OMP_NUM_THREADS=1\nDS_ACCELERATOR=cpu\nGLOO_SOCKET_IFNAME=lo\n")
    command = [
        sys.executable, str(Path(sys.executable).parent / "deepspeed"), "--hostfile", str(folder / "hostfile"),
        "--ssh_port", str(port), "--no_ssh_check", f"--master_addr={HOSTS[0]}", f"--master_port={free_port()}",
        str(SCRIPT), "+model=spec_vit_digits", "data=digits", "deepspeed=zero3", "train.max_steps=3",
        "train.log_every=1", "attack.steps=2", "name=hosts", "registry.enabled=false", "certify.images=4",
    ]  # fmt: skip
    with hosts(folder, port):
        process = subprocess.Popen(
            command, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env=environment() | {"PDSH_SSH_ARGS_APPEND": ssh_arguments(folder)},
        )  # fmt: skip
        status, output = finish(process, seconds=400)
    assert status == 0, output
    for host in HOSTS:
        assert f"{host}: " in output, output  # pdsh prefixes each line with its host
    _, config = zoo.handover.load(folder / "runs" / "hosts" / "handover")
    assert config["ranks"] == 2
    assert [row["step"] for row in rows(folder / "runs" / "hosts") if "loss" in row] == [1, 2, 3]


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, dict[str, float]]:
    return zero_runs.differences(folder, "models")


MODELS = ("l2_vit_ti", "spec_vit_digits", "dp_convit_ti", "dp_swin_t", "conv_4c3f")
WAYS = [*MODELS, *(f"{model}-recomputed" for model in MODELS if model != "conv_4c3f")]


@pytest.mark.parametrize("way", WAYS)
def test_every_kind_of_model_equals_one_plain_process_at_stage_3(found: dict[str, dict[str, float]], way: str) -> None:
    assert found[way]["loss"] <= 2e-6
    assert found[way]["weight"] <= 1e-5
    assert found[way]["sharded"] == 1.0


def test_weights_cut_over_ranks_from_start_to_handover(folder: Path) -> None:
    """Evaluated with unequal numbers of batches, killed and resumed, it equals an unbroken ZeRO-1 run."""
    run = (*TINY, "train.epochs=2", "train.batch_size=256", "train.eval_images=257", "train.log_every=1",
           "train.checkpoint_every=2")  # fmt: skip
    status, output = finish(launch(SCRIPT, *run, "name=zero1", cwd=folder), seconds=300)
    assert status == 0, output
    process = launch(SCRIPT, *run, *SHARDED, "name=zero3", cwd=folder)
    reach(process, folder / "runs" / "zero3", 7, seconds=300)
    ranks(process, SCRIPT)[1].kill()
    assert finish(process)[0] != 0
    status, output = finish(launch(SCRIPT, *run, *SHARDED, "name=zero3", "resume=auto", cwd=folder), seconds=300)
    assert status == 0, output
    assert "resuming" in output
    one, three = ([row for row in rows(folder / "runs" / name) if "loss" in row] for name in ("zero1", "zero3"))
    assert [row["step"] for row in one] == [row["step"] for row in three] == list(range(1, 13))
    for before, after in zip(one, three, strict=True):
        assert after["loss"] == pytest.approx(before["loss"], abs=1e-4)
    evaluated = json.loads((folder / "runs" / "zero3" / "handover" / "metrics.json").read_text())
    assert evaluated["eval_images"] == 257
    weights, others = (
        load_file(folder / "runs" / name / "handover" / "model.safetensors") for name in ("zero1", "zero3")
    )
    for key, weight in weights.items():
        assert (others[key] - weight).abs().max() <= 1e-3, key


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile wants a C++ compiler, and there is no g++")
def test_compiled_training_is_the_same_training(folder: Path) -> None:
    """Attack, training pass and penalties give the same losses up to the rounding of fused kernels."""
    tiny = [word for word in TINY if word != "+model.drop_path_rate=0.2"]
    run = (*tiny, "+model.drop_path_rate=0", "train.max_steps=4", "train.log_every=1", "train.eval_images=16")
    for name, extra in {"eager": (), "compiled": ("train.compile=true",)}.items():
        status, output = finish(launch(SCRIPT, *run, f"name={name}", *extra, cwd=folder), seconds=500)
        assert status == 0, output
    eager, compiled = ([row for row in rows(folder / "runs" / name) if "loss" in row] for name in ("eager", "compiled"))
    for before, after in zip(eager, compiled, strict=True):
        assert after["loss"] == pytest.approx(before["loss"], abs=1e-4)
