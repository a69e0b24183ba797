"""What a rank frees it takes again: the kernel does not clear the same pages every step."""

import platform
import subprocess
import sys

import pytest

STEPS = """
import resource
from trainers.engine.memory import keep_freed_memory
keep_freed_memory()
import torch
import zoo
from trainers.objectives.lmce import margin_slopes
torch.set_num_threads(1)
model = zoo.create_model("cert_gpsa_vit_c10").train()
images, labels = torch.rand(128, 3, 32, 32), torch.arange(128) % 10
def step():
    logits, slope = margin_slopes(model, images, labels, 0.0)
    (logits.logsumexp(1).mean() + slope.mean()).backward()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    step()
before = faults()
for _ in range(4):
    step()
print((faults() - before) // 4)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc of another library")
def test_what_is_freed_is_not_cleared_by_the_kernel_again() -> None:
    """A step's largest blocks are 2048 pages each; without it every one of them is cleared several times a step."""
    told = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True, check=True, timeout=120)
    assert int(told.stdout) < 2048
