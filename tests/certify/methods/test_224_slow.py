"""At 224 pixels, 16-pixel patches and 1000 classes, useful answers come within the limits of time and memory."""

import json
import subprocess
import sys
from typing import Any

import pytest

LIMIT = 8 * 2**30
RUN = """
import json, resource, sys, time
import torch, zoo
from certify.api import certifier, radius_of
from certify.stage.outcomes import status

model_name, method, *words = sys.argv[1:]
torch.set_num_threads(1)
torch.manual_seed(0)
model = zoo.create_model(model_name, num_classes=1000).eval()
image = torch.rand(1, 3, 224, 224)
label = model(image).argmax(-1)
start = time.process_time()
analysis = certifier(model, method, "one").analyse(image, label)
rows = []
for eps in map(float, words):
    answer = analysis.at(eps)
    row = {"eps": eps, "status": status(answer)[0], "correct": bool(answer.correct_B), "loss": float(answer.loss_B)}
    rows.append(row)
radius = None if words else float(radius_of(analysis))
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"rows": rows, "radius": radius, "peak": peak, "seconds": time.process_time() - start}))
"""


def answered(*words: str) -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-c", RUN, *words], capture_output=True, text=True, timeout=5400, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(found)
    assert found["peak"] < LIMIT
    return found


@pytest.mark.slow
@pytest.mark.timeout(5400)
def test_a_vit_s_is_answered_by_its_layers() -> None:
    rows = answered("dp_vit_s", "adjoint", "1e-6", "1e-3", "0.02")["rows"]
    for row in rows:
        assert row["status"] in ("certified", "not certified", "unknown")
        assert row["correct"]
        assert row["loss"] >= 0, "finite or infinite, never not a number"
    assert rows[0]["loss"] <= rows[-1]["loss"]


@pytest.mark.slow
@pytest.mark.timeout(5400)
def test_a_vit_ti_is_certified_on_the_ball_of_images() -> None:
    assert answered("dp_vit_ti", "image")["radius"] > 1e-4
