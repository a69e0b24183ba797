"""The work of one process of the evaluation: clean, attacked and certified answers for a block of images.

A misclassified image has no robustness to lose: it counts as broken by every attack.

Letters: B images of a block, I those of them that are classified correctly.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path

import torch
from torch import Tensor, nn

import zoo
from certify.api import captured, radius_of
from certify.evaluation.protocol import attack_of, covering
from certify.evaluation.refuted import Found, refuse
from certify.evaluation.settings import Settings
from certify.methods.served import certifier_of
from certify.rows.devices import DTYPES, device_of
from certify.rows.draws import draws
from certify.rows.row_schema import Kind, Row, RowSchema, amount, chance, flag, perhaps, real, whole
from certify.rows.workers import Batch
from certify.shared.bake import logit_differences
from certify.shared.ball import L2
from certizoo.attacks.attack import Attack
from certizoo.attacks.guard import Forward
from certizoo.attacks.losses import margin
from certizoo.attacks.norms import distance
from zoo.models.sentences import by_length


class EvaluateBlock:
    """A hand-over, its certifier and the attacks of a protocol on one device; a call with a block returns its rows.

    `proved`: rows of a certification by image key, used instead of the certifier.
    """

    def __init__(
        self,
        handover: Path,
        worker: int = 0,
        *,
        settings: Settings,
        out: Path,
        proved: Mapping[str, Row] | None = None,
    ) -> None:
        self.out, self.proved, self.device = out, proved, device_of(worker, settings.device)
        self.model, self.config = zoo.handover.load(handover)
        self.model.to(self.device)
        options = zoo.model_options(**self.config["model"])
        self.certifier, self.settings = None, settings
        if settings.method and proved is None:
            shape_CHW = zoo.input_size(options)
            model = captured(self.model, shape_CHW)
            self.settings = settings = settings.of(model, shape_CHW)
            of = str(settings.method), settings.served_dtype, settings.nonce, settings.norm
            self.certifier = certifier_of(model, *of)
        self.attacked = in_dtype(self.model, settings.attack_dtype)
        shape = options["num_classes"], options["img_size"]
        self.attacks = {name: attack_of(name, said, self.model, *shape) for name, said in settings.attacks.items()}

    def __call__(self, block: Batch) -> list[Row]:
        """Return one row per image. Sentences of one length are evaluated together.

        Columns: {key, label, prediction, correct, margin}; with a method {radius.<method>, failure, seconds.certify};
        for every attack {survives.<name>, l2.<name>: the distance of the point that fools, None if none does,
        <norm>.<name>: the same in the norm of the radii, seconds.<name>, and certified.<name> if the attack stays in a
        ball}.

        Raises UnsoundCertificate if an attack fools within a certified radius; its image is then in OUT/refuted.
        """
        keys, given, labels = block[0], block[1].to(self.device), block[2].to(self.device)
        parts = by_length(self.model, keys, given, labels)
        rows = {row["key"]: row for part in parts for row in self._rows(*part)}
        return [rows[key] for key in keys]

    def _rows(self, keys: list[str], images: Tensor, labels: Tensor) -> list[Row]:
        logits = torch.cat([self.model(x) for x in self._split(images)])
        correct = logits.argmax(1) == labels
        columns: dict[str, list[object]] = {
            "key": list(keys),
            "label": labels.tolist(),
            "prediction": logits.argmax(1).tolist(),
            "correct": correct.tolist(),
            "margin": (-margin(logits, labels)).tolist(),
        }
        radius_B, certificate = self._certified(keys, images, labels)
        columns |= certificate
        for name, attack in self.attacks.items():
            columns |= self._attacked(name, attack, keys, images, labels, correct, radius_B)
        return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]

    def _certified(self, keys: Sequence[str], images: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, list[object]]]:
        """Return the certified radii (B,), -1 without a method, and their columns."""
        radius = f"radius.{self.settings.method}"
        if self.proved is not None:
            rows = [self.proved[key] for key in keys]
            taken = {radius: radius, "failure": "failure", "seconds.certify": "seconds"}
            columns: dict[str, list[object]] = {to: [row[name] for row in rows] for to, name in taken.items()}
            return torch.tensor(columns[radius], dtype=torch.float64), columns
        if self.certifier is None:
            return torch.full((len(labels),), -1.0, dtype=torch.float64), {}
        start = time.perf_counter()
        logit_differences(self.model, self.certifier.baked, images)
        analysis = self.certifier.analyse(images, labels)
        radius_B = radius_of(analysis)
        seconds = (time.perf_counter() - start) / len(labels)
        return radius_B.cpu(), {
            radius: radius_B.tolist(),
            "failure": [analysis.failure] * len(labels),
            "seconds.certify": [seconds] * len(labels),
        }

    def _attacked(
        self,
        name: str,
        attack: Attack,
        keys: Sequence[str],
        images: Tensor,
        labels: Tensor,
        correct: Tensor,
        radius_B: Tensor,
    ) -> dict[str, list[object]]:
        index_I = correct.nonzero().flatten()
        start = time.perf_counter()
        adversarial = images.clone()
        for part in self._parts(attack, index_I):
            own = draws([keys[i] for i in part.tolist()], self.settings.seed)
            adversarial[part] = attack.run(self.attacked, images[part], labels[part], own).to(images)
        seconds = (time.perf_counter() - start) / max(1, len(index_I))
        survives = correct & (torch.cat([self.model(x).argmax(1) for x in self._split(adversarial)]) == labels)
        fooled, norm = (correct & ~survives).cpu(), self.settings.norm
        far = {each: distance(adversarial, images, each).cpu() for each in dict.fromkeys((L2, norm))}
        for i in (fooled & (far[norm] <= radius_B)).nonzero().flatten().tolist():
            distances = float(far[norm][i]), float(radius_B[i])
            refuse(Found(keys[i], images[i], adversarial[i], int(labels[i]), name, norm, *distances), self.out)
        columns: dict[str, list[object]] = {
            f"survives.{name}": survives.tolist(),
            **{f"{each}.{name}": _where(fooled, far_B) for each, far_B in far.items()},
            f"seconds.{name}": [seconds] * len(keys),
        }
        ball = covering(attack, norm, images[0].numel())
        if ball is not None and self.settings.method:
            columns[f"certified.{name}"] = (radius_B >= ball).tolist()
        return columns

    def _parts(self, attack: Attack, index_I: Tensor) -> Iterator[Tensor]:
        """Yield the indices of images that are attacked together.

        Beyond rounding, the grouping matters only to attacks that draw for all images at once.
        """
        size = self.settings.block if attack.together else self.settings.batch_size
        return (part for part in index_I.split(size) if len(part))

    def _split(self, images: Tensor) -> tuple[Tensor, ...]:
        return images.split(self.settings.batch_size)


def _where(chosen_B: Tensor, values_B: Tensor) -> list[object]:
    """Return the chosen values, None for the others."""
    return [value if chosen else None for value, chosen in zip(values_B.tolist(), chosen_B.tolist(), strict=True)]


def row_schema_of(settings: Settings, attacks: Mapping[str, Attack]) -> RowSchema:
    """Return the schema of the rows of `EvaluateBlock`."""
    needed: dict[str, Kind] = {"prediction": whole, "correct": flag, "margin": real}
    if settings.method:
        needed |= {f"radius.{settings.method}": amount, "failure": chance, "seconds.certify": amount}
    for name, attack in attacks.items():
        if settings.method and covering(attack, settings.norm, 1) is not None:
            needed |= {f"certified.{name}": flag}
        needed |= {f"{norm}.{name}": perhaps(amount) for norm in (L2, settings.norm)}
        needed |= {f"survives.{name}": flag, f"seconds.{name}": amount}

    def contradiction(row: Row) -> str | None:
        """Check that certificates, attacks and clean answers are nested, and that survivors were not fooled."""
        if row["correct"] != (row["prediction"] == row["label"]):
            return f"has correct={row['correct']}, prediction {row['prediction']} and label {row['label']}"
        for name in attacks:
            survives, fooled = row[f"survives.{name}"], row[f"l2.{name}"] is not None
            if row.get(f"certified.{name}", False) > survives or fooled != (row["correct"] and not survives):
                return f"is certified but does not survive {name}, or survives it with a wrong prediction"
        return None

    return RowSchema(needed, contradiction=contradiction)


def in_dtype(model: nn.Module, dtype: str | None) -> nn.Module:
    """Return the model that is attacked; its adversarial points are judged by the model itself."""
    return model if dtype is None else Forward(deepcopy(model).to(DTYPES[dtype]))
