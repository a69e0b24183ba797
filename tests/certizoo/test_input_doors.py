"""Every door takes images, labels and radii alike: what can mean only one thing is accepted, all else is one line.

The doors are enumerated: kinds of attack, and public functions of the packages that take images or a radius.
"""

import inspect
from collections.abc import Callable
from dataclasses import fields
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Generator, Tensor, nn

import certify
import zoo
from certify.served import Served
from certify.stage.settings import Settings
from certizoo import UserError, attacks
from certizoo.attacks import KINDS, AttackConfig, fgsm, make, pgd
from certizoo.attacks.transfer import Transfer
from tests.tools.attacked import OPTIONS, attack_of, images_of, mlp, own_labels
from tests.tools.cases import mostly_slow
from tests.tools.folders import FILES, ROOT
from tests.tools.small_models import PARTS, SMALL, labelled, small_model

ATTACKS: dict[str, Callable[[nn.Module, Tensor, Tensor], Any]] = {
    kind: lambda model, x, y, kind=kind: attack_of(kind).run(model, x, y, Generator().manual_seed(0)) for kind in KINDS
} | {
    "pgd()": lambda model, x, y: pgd(model, x, y, AttackConfig(steps=1, loss="margin"), Generator().manual_seed(0)),
    "fgsm()": lambda model, x, y: fgsm(model, x, y, AttackConfig(steps=1, random_start=False)),
    "transfer": lambda model, x, y: Transfer(model, AttackConfig(steps=1, random_start=False)).run(mlp(), x, y),
}
CERTIFICATES: dict[str, Callable[[nn.Module, Tensor, Tensor], Any]] = {
    "certify()": lambda model, x, y: certify.certify(model, x, y, 0.01).certified_B,
    "certified_radius()": lambda model, x, y: certify.certified_radius(model, x, y, "lofast", "a"),
    "evaluate()": lambda model, x, y: certify.evaluate(model, x, y, eps=[0.01], method="lofast")["margin"].to_numpy(),
    "explain()": lambda model, x, y: certify.explain(model, x, y, nonce="a").radius_B,
}
DOORS = ATTACKS | CERTIFICATES

IMAGES: dict[str, Callable[[Tensor], Any]] = {
    "a list": lambda x: x.tolist(),
    "bytes": lambda x: (x * 255).byte(),
    "0..255": lambda x: x * 255,
    "normalised": lambda x: x - 0.5,
    "NaN": lambda x: x.index_fill(0, torch.tensor([1]), torch.nan),
    "infinite": lambda x: x.index_fill(0, torch.tensor([1]), torch.inf),
    "one image": lambda x: x[0],
    "fewer": lambda x: x[:2],
}
LABELS: dict[str, Callable[[Tensor], Any]] = {
    "a list": lambda y: y.tolist(),
    "an array": lambda y: y.numpy(),
    "one-hot": lambda y: nn.functional.one_hot(y, 10),
    "a column": lambda y: y[:, None],
    "floats": lambda y: y.float(),
    "bools": lambda y: y > 0,
    "fewer": lambda y: y[:2],
    "one": lambda y: y[0],
}
OTHER_CLASSES: dict[str, Callable[[Tensor], Any]] = {
    "too large": lambda y: y.index_fill(0, torch.tensor([1]), 10),
    "negative": lambda y: y.index_fill(0, torch.tensor([1]), -100),  # which torch's cross-entropy ignores
}
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32]


@cache
def call(door: str) -> tuple[nn.Module, Tensor, Tensor]:
    """Return a model of 10 classes, images and labels that the door accepts."""
    if door in CERTIFICATES:
        model = small_model("lofast", 0)
        x, y = labelled(model, 4, 0)
        return model, x.float(), y
    model = mlp(side=32 if door == "corruption" else 8)
    x = images_of(4, 32 if door == "corruption" else 8)
    return model, x, own_labels(model, x)


def refused(door: str, model: nn.Module, x: Any, y: Any) -> str:
    with pytest.raises(UserError) as error:
        DOORS[door](model, x, y)
    return str(error.value)


@pytest.mark.parametrize("images", IMAGES)
@pytest.mark.parametrize("door", DOORS)
def test_images_of_another_kind_are_one_line(door: str, images: str) -> None:
    model, x, y = call(door)
    assert "images" in refused(door, model, IMAGES[images](x), y)


@pytest.mark.parametrize("labels", LABELS)
@pytest.mark.parametrize("door", DOORS)
def test_labels_of_another_kind_are_one_line(door: str, labels: str) -> None:
    model, x, y = call(door)
    assert "labels" in refused(door, model, x, LABELS[labels](y))


@pytest.mark.parametrize("labels", OTHER_CLASSES)
@pytest.mark.parametrize("door", [door for door in DOORS if door != "corruption"])  # it asks the model nothing
def test_labels_that_are_no_classes_of_the_model_are_one_line(door: str, labels: str) -> None:
    model, x, y = call(door)
    assert "labels must lie in 0.." in refused(door, model, x, OTHER_CLASSES[labels](y))


@pytest.mark.parametrize("door", [door for door in DOORS if door != "corruption"])
def test_a_model_with_a_single_logit_is_one_line(door: str) -> None:
    _, x, y = call(door)
    model = nn.Sequential(nn.Flatten(), nn.Linear(x[0].numel(), 1)).eval()
    assert "single logit" in refused(door, model, x, torch.zeros_like(y))


@pytest.mark.parametrize("door", mostly_slow(DOORS, *DOORS.keys() - {"explain()"}))
def test_labels_of_every_integer_type_are_the_same(door: str) -> None:
    model, x, y = call(door)
    expected = np.asarray(DOORS[door](model, x, y))
    for dtype in INTEGERS:
        assert np.array_equal(np.asarray(DOORS[door](model, x, y.to(dtype))), expected), dtype


def test_probabilities_are_labels_of_cross_entropy_alone() -> None:
    model, x, y = call("pgd")
    one_hot = nn.functional.one_hot(y, 10).float()
    ce, margin = (AttackConfig(steps=2, random_start=False, loss=loss) for loss in ("ce", "margin"))
    assert torch.equal(ce.run(model, x, one_hot), ce.run(model, x, y))
    with pytest.raises(UserError, match=r"labels.argmax\(1\)"):
        margin.run(model, x, one_hot)
    with pytest.raises(UserError, match=r"labels must lie in 0\.\.9"):
        ce.run(model, x, nn.functional.one_hot(y, 12).float())


def takes(package: Any, name: str) -> set[str]:
    """Return the public functions of a package with a parameter of this name."""
    public = {key: getattr(package, key) for key in package.__all__}
    return {
        f"{key}()"
        for key, one in public.items()
        if inspect.isfunction(one) and name in inspect.signature(one).parameters
    }


def test_every_public_function_of_images_is_a_door() -> None:
    assert takes(attacks, "images_BCHW") | takes(certify, "images_BCHW") <= set(DOORS)


# door of a radius -> the call with a radius of 8 in Linf
RADII: dict[str, Callable[[], Any]] = {
    kind: lambda kind=kind: make({"kind": kind} | OPTIONS[kind] | {"norm": "linf", "eps": 8})
    for kind, cls in KINDS.items()
    if "eps" in {field.name for field in fields(cls)}
} | {
    "pgd by default": lambda: AttackConfig(eps=8),
    "certify.eps": lambda: Settings(norm="linf", eps=(8.0,), headline_eps=8.0),
    "certify()": lambda: certify.certify(*call("certify()"), 8, norm="linf"),
    "one an image": lambda: certify.certify(*call("certify()"), torch.full((4,), 8.0), norm="linf"),
    "evaluate()": lambda: certify.evaluate(*call("certify()"), eps=[8], norm="linf"),
}


@pytest.mark.parametrize("door", RADII)
def test_a_radius_meant_in_255ths_is_refused_with_the_number_that_was_meant(door: str) -> None:
    with pytest.raises(UserError, match=r"=8 is too large: pixels lie in \[0,1\].*=0\.03137 for 8/255"):
        RADII[door]()


def test_every_public_function_of_a_radius_is_a_door() -> None:
    assert takes(attacks, "eps") | takes(certify, "eps") <= set(RADII)


ARRAYS: dict[str, Callable[[np.ndarray], Any]] = {
    "bytes": lambda x: (x * 255).astype(np.uint8),
    "0..255": lambda x: x * 255,
    "normalised": lambda x: x - 0.5,
    "NaN": lambda x: np.where(x == x[1], np.nan, x),
    "one image": lambda x: x[0],
    "no image": lambda x: x[:0],
    "channels last": lambda x: x.transpose(0, 2, 3, 1),
    "another size": lambda x: x[..., :4],
    "text": lambda x: "picture.png",
    "ragged": lambda x: [[1.0], [1.0, 2.0]],
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    folder = tmp_path_factory.mktemp("handover")
    config = {"name": "dp_vit_ti"} | SMALL | PARTS["lofast"]
    zoo.handover.save(folder, zoo.create_model(**config), config, {})
    return Served(folder)


@pytest.mark.parametrize("images", ARRAYS)
def test_a_served_model_answers_for_images_in_the_unit_box_alone(images: str, served: Served) -> None:
    x = images_of(4).numpy()
    assert served.predict(x).shape == (4, 4)
    assert np.array_equal(served.predict(x.astype(np.float64)), served.predict(x))
    with pytest.raises(UserError, match="images"):
        served.predict(ARRAYS[images](x))


def test_every_loader_that_mlflow_calls_is_a_door() -> None:
    loaders = {file.as_posix() for file in FILES if "def _load_pyfunc" in (ROOT / file).read_text()}
    assert loaders == {"certify/served.py"}
