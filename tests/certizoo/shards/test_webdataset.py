"""webdataset as oracle: its own reader finds in our shards the samples, pixels and labels that ours finds."""

from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
import webdataset
from PIL import Image

from certizoo import shards
from tests.tools.stage_runs import data

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.mark.parametrize("split", ["train", "test"])
def test_its_reader_finds_what_ours_finds(digits: Path, split: str) -> None:
    config = data(digits)
    ours = {
        key: (image, int(label))
        for keys, images, labels in shards.eval_loader(shards.find(config, split), config, batch_size=256)
        for key, image, label in zip(keys, images, labels, strict=True)
    }
    urls = [str(path) for path in sorted(digits.glob(f"digits-{split}-*.tar"))]
    theirs = {sample["__key__"]: sample for sample in webdataset.WebDataset(urls, shardshuffle=False)}
    assert theirs.keys() == ours.keys()
    for key, (image, label) in ours.items():
        pixels = torch.from_numpy(np.array(Image.open(BytesIO(theirs[key]["png"])))) / 255
        assert torch.equal(pixels[None], image), key
        assert int(theirs[key]["cls"]) == label, key
