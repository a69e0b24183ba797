"""An answer shows a radius and an attack: `certify` proves the radius, and the attack succeeds beyond it."""

import csv
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

import certify
import zoo
from certify.__main__ import main
from certify.api import radius_of
from certify.methods.served import certifier_of
from certify.photos import picture
from certify.photos.names import KNOWN, names_of
from certify.photos.photo import photo, read
from certify.photos.predict import Answer, Asked, Predictor
from certify.photos.samples import sample_of, samples
from certify.shared.certificate import UnsoundCertificate
from certizoo.attacks.norms import distance
from tests.tools.cases import mostly_slow

Encoded = Callable[..., bytes]


@pytest.fixture(scope="module")
def answers(predict: Predictor, digit: Encoded) -> list[Answer]:
    """Return answers for two digits, in both norms."""
    photos = [photo(digit(n), f"{n}.png", 1, 8) for n in range(2)]
    return [predict(one, norm) for norm in ("l2", "linf") for one in photos]


def test_the_radius_is_the_certified_one_and_the_attack_is_beyond_it(predict: Predictor, answers: list[Answer]) -> None:
    for answer in answers:
        image_BCHW, label_B = answer.photo.image_CHW[None], torch.tensor([answer.label])
        exact = certify.certified_radius(predict.model, image_BCHW, label_B, answer.method, "0", answer.norm)
        assert 0.9 * float(exact) <= answer.radius <= float(exact)
        assert answer.attacked_CHW is not None
        assert answer.distance is not None
        assert int(predict.model(answer.attacked_CHW[None]).argmax()) == KNOWN["digits"].index(answer.attacked_name)
        assert answer.attacked_name != answer.name
        assert 0 <= float(answer.attacked_CHW.min()) <= float(answer.attacked_CHW.max()) <= 1
        apart = float(distance(answer.attacked_CHW[None].double(), image_BCHW.double(), answer.norm))
        assert answer.radius < answer.distance == apart
    assert all(answer.radius > 0 for answer in answers[:2])


def test_the_attack_is_near(answers: list[Answer]) -> None:
    """The search ends just beyond the boundary: one percent less of the same change does not succeed."""
    assert all(answer.distance is not None and answer.distance < 20 * answer.radius for answer in answers[:2])


def test_a_radius_in_words_is_never_more_than_it_is(answers: list[Answer]) -> None:
    for radius in torch.linspace(1e-4, 0.9, 997).tolist():
        for norm, unit in (("l2", 1.0), ("linf", 1 / 255)):
            said = replace(answers[0], radius=radius, norm=norm).proved
            assert float(said.removesuffix("/255")) * unit <= radius * (1 + 1e-12)
    assert replace(answers[0], radius=0.0).proved == "nothing"


def test_the_scale_of_a_radius_is_never_more_than_it_is(answers: list[Answer]) -> None:
    for answer in answers:
        steps, values = 255 * answer.radius, answer.photo.image_CHW.numel()
        said = [float(word) for word in re.findall(r"by (\d+(?:\.\d+)?)", answer.scale)]
        truth = [steps] if answer.norm == "linf" else [steps, steps / values**0.5]
        assert all(0 <= word <= most for word, most in zip(said, truth, strict=True))


@pytest.mark.parametrize("path", samples(), ids=lambda path: path.stem)
def test_a_sample_is_named_by_its_class_and_is_recognised(path: Path) -> None:
    model = zoo.create_model("cert_vit_c10", pretrained=True).eval()
    image_CHW = read(path, 3, 32).image_CHW
    assert names_of("cifar10", 10)[int(model(image_CHW[None]).argmax())] == path.stem
    assert sample_of(path.stem) == path
    assert read(path, 3, 32).name == path.name


@pytest.mark.parametrize(
    ("served", "words"),
    mostly_slow([("float32", "as served in float32"), (None, "exact arithmetic")], ("float32", "as served in float32")),
)
def test_a_slow_method_answers_after_a_quick_one(
    served: str | None, words: str, handover: Path, digit: Encoded, tmp_path: Path
) -> None:
    """Both radii are of the served model unless that is switched off, and the attack is one."""
    predict = Predictor(handover, Asked(nonce="0", steps=5, served_dtype=served), tmp_path)
    quick, last = predict.answers(photo(digit(0), "0.png", 1, 8))
    assert (quick.method, last.method) == ("adjoint", "best")
    assert 0 < quick.radius <= last.radius < (last.distance or 0) == quick.distance
    assert f"(best, {words})" in last.words()
    prover = certifier_of(predict.model, "best", served, "0", "l2")
    image_BCHW, label_B = last.photo.image_CHW[None], torch.tensor([last.label])
    assert last.radius == pytest.approx(float(radius_of(prover.analyse(image_BCHW, label_B))), rel=1e-9)


def test_it_says_of_which_image_the_radius_is(predict: Predictor, digit: Encoded, answers: list[Answer]) -> None:
    assert "Radii are of the 8x8 image in" in answers[0].words()
    larger = predict(photo(digit(0, times=5, kind="JPEG"), "large.jpg", 1, 8))
    assert "Radii are of the 8x8 image that the 40x40 photograph was resized to" in larger.words()


def test_an_attack_within_the_radius_is_an_alarm(
    predict: Predictor, digit: Encoded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A certifier that claims too much is detected, and both images are kept."""
    monkeypatch.setattr("certify.photos.predict.radius_of", lambda analysis: torch.tensor([3.0]))
    with pytest.raises(UnsoundCertificate, match="the certificate is wrong"):
        predict(photo(digit(0), "0.png", 1, 8))
    assert list((predict.refuted / "refuted").glob("*.safetensors"))


def test_pictures_show_the_change_around_grey(answers: list[Answer]) -> None:
    panels = picture.panels(answers[0])
    assert [title for title, _, _ in panels] == [answers[0].name, answers[0].attacked_name, "the change"]
    assert all(0 <= float(image.min()) <= float(image.max()) <= 1 + 1e-6 for _, _, image in panels)
    assert answers[0].proved in panels[0][1]
    alone = replace(answers[0], attacked_CHW=None, distance=None)
    assert len(picture.panels(alone)) == 1
    assert "No attack was found." in alone.words()


def test_the_command_writes_a_picture_and_a_row_of_each(
    handover: Path, digit: Encoded, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / "a=1.png", tmp_path / "sub" / "b.png"]
    files[1].parent.mkdir()
    for number, file in enumerate(files):
        file.write_bytes(digit(number))
    out = tmp_path / "out"
    main(["image", *map(str, files), f"handover={handover}", "method=adjoint", "nonce=0", "steps=5", f"out={out}"])
    shown = capsys.readouterr().out
    assert all(f"{file}: " in shown for file in files)
    with (out / "images.csv").open(newline="") as table:
        rows = list(csv.DictReader(table))
    assert [row["file"] for row in rows] == [str(file) for file in files]
    assert all(float(row["radius"]) < float(row["attack_distance"]) for row in rows)
    assert [Image.open(path).width > 800 for path in sorted(out.glob("*.png"))] == [True, True]


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        ([], "name a photograph"),
        (["ships", "model=cert_vit_c10"], "there is no file ships"),
        (["no.png", "model=cert_vit_c10"], "there is no file no.png"),
        (["no.png"], "set what to certify"),
        (["no.png", "model=dp_vit_ti"], "models with weights: cert_"),
        (["no.png", "model=cert_vit_c10", "norm=l3"], "norm='l3' is invalid; give one of l2, linf"),
        (["no.png", "model=cert_vit_c10", "steps=0"], "steps=0"),
        (["no.png", "model=cert_vit_c10", "stepps=3"], "steps"),
        (["no.png", "model=cert_vit_c10", "--fast"], "is a flag"),
    ],
)
def test_a_mistake_is_one_line(words: list[str], fix: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["image", *words])
    said = capsys.readouterr().err
    assert left.value.code == 2
    assert fix in said
    assert said.count("\n") == 1


def test_names_are_used_where_they_fit() -> None:
    assert names_of("cifar10", 10)[3] == "cat"
    assert names_of("cifar10", 4)[3] == names_of("other", 10)[3] == "class 3"


def test_a_published_model_by_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Image.new("RGB", (64, 48), "navy").save(tmp_path / "sea.png")
    main(["image", str(tmp_path / "sea.png"), "model=cert_vit_c10", "method=adjoint", "steps=5"])
    shown = capsys.readouterr().out
    assert any(f": {name} (" in shown for name in KNOWN["cifar10"])
    assert "the 32x32 image that the 64x48 photograph" in shown
