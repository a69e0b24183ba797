"""The work of one process of the certify stage: certify and attack the images of a batch on its own device."""

import copy
from pathlib import Path

import torch
from torch import Tensor

import zoo
from certify.api import captured
from certify.methods.served import certifier_of
from certify.rows.devices import DTYPES, device_of
from certify.rows.row_schema import Row
from certify.rows.workers import Batch
from certify.shared.bake import logit_differences
from certify.stage import substitutions
from certify.stage.outcomes import POSITION_ONLY, rows_of
from certify.stage.settings import Settings
from certizoo.attacks.guard import Forward
from zoo.models.sentences import by_length


class CertifyBatch:
    """A hand-over and its certifier on one device; a call with a batch returns its rows."""

    def __init__(self, handover: Path, worker: int = 0, *, settings: Settings) -> None:
        self.device = device_of(worker, settings.device)
        self.model, self.config = zoo.handover.load(handover)
        self.model.to(self.device)
        self.embedding, self.substitutions = self.model, substitutions.counter(self.model)
        self.positional = zoo.without_content(self.model)
        options = zoo.model_options(**self.config["model"])
        shape_CHW = zoo.input_size(options)
        model = captured(self.model, shape_CHW)
        self.settings = settings = settings.of(model, shape_CHW)
        settings.attack.require_model(self.model, options["num_classes"], options["img_size"])
        dtype = settings.served_dtype
        self.certifier = certifier_of(model, settings.method, dtype, settings.nonce, settings.norm)
        if dtype is not None:
            self.model = Forward(copy.deepcopy(self.model).to(DTYPES[dtype]))

    def __call__(self, batch: Batch) -> list[Row]:
        """Return the rows of `outcomes.rows_of`, with two further columns.

        They are the largest difference between served and certified logits of each image, and whether the image is
        classified correctly by positions alone. Sentences of one length are certified together, and have a further
        column, the share of substitutions that the radius covers.
        """
        keys, given, labels = batch[0], batch[1].to(self.device), batch[2].to(self.device)
        parts = by_length(self.embedding, keys, given, labels)
        rows = {row["key"]: row for part in parts for row in self._rows(*part)}
        if self.substitutions is not None:
            for key, numbers in zip(keys, batch[1].tolist(), strict=True):
                radius = rows[key][f"radius.{self.settings.method}"]
                rows[key][substitutions.COLUMN] = self.substitutions(numbers, radius)
        return [rows[key] for key in keys]

    def _rows(self, keys: list[str], images: Tensor, labels: Tensor) -> list[Row]:
        differences = logit_differences(self.model, self.certifier.baked, images).tolist()
        rows = rows_of(
            self.certifier,
            self.model,
            keys,
            images,
            labels,
            method=self.settings.method,
            eps_grid=self.settings.grid,
            search_radii=self.settings.search_radii,
            attack=self.settings.attack_in_norm,
            explain_at=self.settings.headline,
        )
        for row, difference in zip(rows, differences, strict=True):
            row["served_difference"] = difference
        if self.positional is not None:
            with torch.no_grad():
                correct = (self.positional(images).argmax(-1) == labels).tolist()
            for row, alone in zip(rows, correct, strict=True):
                row[POSITION_ONLY] = alone
        return rows
