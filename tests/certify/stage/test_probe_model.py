"""The certified shares of a few images during training equal those of the stage."""

from typing import Any

import pytest
import torch

from certify.api import certifier
from certify.shared.certificate import UnsoundCertificate
from certify.stage.outcomes import evaluate
from certify.stage.probe_model import certify_probe
from certify.stage.settings import Settings
from tests.tools.small_models import labelled, small_model

EPS = (0.01, 0.1)
ASKED = Settings(method="lofast", eps=EPS, headline_eps=0.1, nonce="n")


def in_batches(images: torch.Tensor, labels: torch.Tensor) -> Any:
    keys = [str(place) for place in range(len(labels))]
    parts = zip(images.split(8), labels.split(8), strict=True)
    return ((keys[8 * i : 8 * i + len(y)], x, y) for i, (x, y) in enumerate(parts))


def test_shares_are_those_of_the_stage() -> None:
    model = small_model("smooth", 0)
    images, labels = labelled(model, 20, 0)
    labels[::5] = (labels[::5] + 1) % 4
    found = certify_probe(model, in_batches(images, labels), ASKED, seconds=1000.0)
    table = evaluate(model, images, labels, eps=EPS, method="lofast", nonce="n")
    assert found["certified_images"] == 20
    for eps in EPS:
        assert found[f"certified_acc.{eps}"] == pytest.approx((table[f"certified.{eps}"] == "certified").mean())
        assert found[f"pgd_acc.{eps}"] == pytest.approx(table[f"pgd.{eps}"].mean())
    answer = certifier(model, "lofast", "n").analyse(images, labels).at(0.1)
    share_B = torch.where(answer.correct_B, answer.loss_B / answer.margin_B, torch.inf)
    assert found["certified_near.0.1"] == pytest.approx(float((1 / (1 + share_B**2)).mean()))
    assert 0 < found["certified_acc.0.01"] <= found["pgd_acc.0.01"] < 1


def test_who_has_no_time_looks_at_one_batch() -> None:
    model = small_model("smooth", 0)
    found = certify_probe(model, in_batches(*labelled(model, 20, 0)), ASKED, seconds=1e-9)
    assert found["certified_images"] == 8


def test_an_attack_that_refutes_a_certificate_stops_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The attack here fools the model everywhere."""
    model = small_model("smooth", 0)
    monkeypatch.setattr(
        "certify.stage.probe_model.survives", lambda model, keys, *_: torch.zeros(len(keys), dtype=torch.bool)
    )
    with pytest.raises(UnsoundCertificate, match=r"image \d+ is certified by lofast at eps 0.01"):
        certify_probe(model, in_batches(*labelled(model, 20, 0)), ASKED, seconds=1000.0)
