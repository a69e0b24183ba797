"""Section 6.3 of SpecFormer for one model, or for two on the same images.

    OUT/features.json                 A-distance, accuracies and largest singular values
    OUT/tsne.csv, .png                features of every image, clean and attacked, in the plane: Figures 2b, 2c
    OUT/sigma_max_weights.csv, .png   of W_Q, W_K, W_V in every attention layer: Figure 2a

Letters: N images, D width of the features.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

import zoo
from certify.papers import feature_distance, feature_figures, layer_norms
from certify.papers.features import Features, clean_and_attacked
from certify.rows import images
from certify.rows.devices import Device, device_of
from certify.rows.records import results, write_csv, write_json
from certify.rows.summary import Summary
from certify.rows.workers import Batch
from certify.shared.bake import bake
from certizoo import UserError, __version__, shards
from certizoo.attacks import AttackConfig
from certizoo.config.schema import Count, Ge, Section, Whole
from certizoo.progress import Progress, counting, silent

FEWEST = 2 * feature_distance.FOLDS  # images
DEFAULT_ATTACK = AttackConfig(norm="linf", eps=8 / 255, steps=20, loss="ce")
NOTE = "the A-distance is an estimate: by one linear classifier, found on some of the images and asked about the others"


@dataclass(frozen=True)
class Settings(Section):
    """The keys of configs/features.yaml. The random starts of the attack follow from seed and batch_size."""

    images: Annotated[int, Ge(FEWEST)] = 500
    attack: AttackConfig = DEFAULT_ATTACK
    seed: Whole = 0
    perplexity: Annotated[float, Ge(1)] = 30
    batch_size: Count = 50
    device: Device = "cpu"


class LoadedModel(NamedTuple):
    """The model of a hand-over, with its name in the figures."""

    name: str
    model: nn.Module
    baked: nn.Module
    weights_sha256: str


class LoadedImages(NamedTuple):
    """The images, which are the same for every model."""

    batches: list[Batch]
    keys: list[str]
    labels_N: Tensor


def run(
    handover: Path,
    against: Path | None,
    data: shards.DataConfig,
    settings: Settings,
    out: Path,
    progress: Progress = silent,
) -> Summary:
    """Write all of OUT and return the content of features.json. `progress(done, total)` is called after every step.

    Raises UserError, before anything is computed, if models or images do not fit, or if another process is at work in
    OUT.
    """
    with results(out):
        return _run(handover, against, data, settings, out, progress)


def _run(
    handover: Path, against: Path | None, data: shards.DataConfig, settings: Settings, out: Path, progress: Progress
) -> Summary:
    models = list(_models([handover] if against is None else [handover, against], data))
    listed = images.image_list(data, settings.images, settings.batch_size)
    loaded = _loaded(listed, settings)
    step = counting(progress, len(models) * (len(loaded.batches) + 1))
    parts = [_one(model, loaded, settings, step) for model in models]
    rows, points, norms = zip(*parts, strict=True)
    summary = {
        "models": list(rows),
        "note": NOTE,
        "images": len(loaded.keys),
        "dataset": data.name,
        "data_digest": listed.test.digest,
        "image_list_sha256": images.digest(loaded.keys),
        "settings": asdict(settings),
        "certizoo": __version__,
    }
    write_csv(out / "tsne.csv", pd.concat(points))
    feature_figures.planes(pd.concat(points), rows, images.class_names(data), out / "tsne.png")
    if any(len(table) for table in norms):
        write_csv(out / "sigma_max_weights.csv", pd.concat([table for table in norms if len(table)]))
        feature_figures.layers(pd.concat([table for table in norms if len(table)]), out / "sigma_max_weights.png")
    write_json(out / "features.json", summary)
    return summary


def _one(
    loaded: LoadedModel, listed: LoadedImages, settings: Settings, step: Callable[[], None]
) -> tuple[Summary, pd.DataFrame, pd.DataFrame]:
    """Return a model's part of features.json, its points in the plane, and its norms."""
    norms = layer_norms.sigma_max(loaded.baked)
    model = loaded.model.to(device_of(0, settings.device))
    found = clean_and_attacked(model, listed.batches, settings.attack, settings.seed, step)
    clean_ND, attacked_ND = found.clean_ND.double().numpy(), found.attacked_ND.double().numpy()
    apart = feature_distance.a_distance(clean_ND, attacked_ND, settings.seed)
    xy = feature_distance.plane(clean_ND, attacked_ND, settings.perplexity, settings.seed)
    step()
    row = {
        "name": loaded.name,
        "weights_sha256": loaded.weights_sha256,
        "width": clean_ND.shape[1],
        "clean": float(found.clean_correct_N.double().mean()),
        "attacked": float(found.attacked_correct_N.double().mean()),
        "a_distance": apart.value,
        "a_distance_interval": list(apart.interval),
        "classifier_error": apart.error,
        "sigma_max": layer_norms.largest(norms),
        "sigma_max_note": layer_norms.note(norms),
    }
    norms.insert(0, "model", loaded.name)
    return row, _points(loaded.name, listed, found, xy), norms


def _points(name: str, listed: LoadedImages, found: Features, xy: feature_distance.Array) -> pd.DataFrame:
    """Return one row for each image, all clean ones first, then the attacked ones."""
    columns = {
        "model": name,
        "key": listed.keys * 2,
        "of": np.repeat(["clean", "attacked"], len(listed.keys)),
        "label": listed.labels_N.repeat(2).numpy(),
        "correct": torch.cat([found.clean_correct_N, found.attacked_correct_N]).numpy(),
        "x": xy[:, 0],
        "y": xy[:, 1],
    }
    return pd.DataFrame(columns)


def _models(folders: Sequence[Path], data: shards.DataConfig) -> Iterator[LoadedModel]:
    """Yield the models. Raises UserError for a model that does not take the images of `data`."""
    for place, folder in enumerate(folders):
        model, config = zoo.handover.load(folder)
        options = config["model"]
        shards.require_fit(data, options)
        name = f"{options['name']}{' (against)' * place}"
        yield LoadedModel(name, model, bake(model), zoo.handover.weights_sha256(folder))


def _loaded(listed: images.ImageList, settings: Settings) -> LoadedImages:
    if listed.total < FEWEST or settings.perplexity >= 2 * listed.total:
        raise UserError(
            f"perplexity={settings.perplexity:g} with {listed.total} images: use at least {FEWEST} images and a "
            "perplexity below twice their number"
        )
    batches = list(listed.batches())
    keys = [key for some, _, _ in batches for key in some]
    return LoadedImages(batches, keys, torch.cat([labels for _, _, labels in batches]))
