"""A model with published weights as a repository of the Hugging Face hub: weights, timm's config.json and a model card.

The weights and `config.yaml` are the files of the table (`zoo/weights/table.yaml`), byte for byte. The repository can
therefore be the `source` of the table's entry, and its digests refuse anything else that the hub may hold later.
"""

import os
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HTTPError
from timm.models._hub import save_config_for_hf

from certizoo import UserError, __version__
from certizoo.documents import read_yaml
from certizoo.norms import NAMES
from zoo.models.factory import create_model
from zoo.weights import fetch, table
from zoo.weights.table import Entry

TIMMS_CONFIG, CARD = "config.json", "README.md"
LOGIN = "log in with `hf auth login`, or set HF_TOKEN to a token that may write there"


def push(name: str, place: str) -> str:
    """Write the published model `name` to the repository hf-hub:OWNER/REPOSITORY, which is created if it is missing.

    Returns:
        the address of these weights with their digest, as `pretrained=` takes it.

    Raises:
        UserError: for another kind of place, a name without weights, and whatever the hub refuses.
    """
    found = fetch.HUB_PLACE.fullmatch(place)
    if not found or found[2] or found[3]:
        raise UserError(f"{place[:200]} is no repository of the hub; write hf-hub:OWNER/REPOSITORY")
    said, repository = table.entry(name), found[1]
    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None, library_name="certizoo", library_version=__version__)
    with TemporaryDirectory() as folder:
        write(said, Path(folder), place)
        try:
            api.create_repo(repository, exist_ok=True)
            done = api.upload_folder(
                repo_id=repository, folder_path=folder, commit_message=f"{name}, certified by CertiZoo {__version__}"
            )
        except (HTTPError, OSError, ValueError) as error:
            silent = isinstance(error, HTTPError) and not isinstance(error, HfHubHTTPError)
            fix = f"{api.endpoint} cannot be reached; check the network and HF_ENDPOINT" if silent else LOGIN
            raise UserError(f"{place} could not be written ({_reason(error)}); {fix}") from None
    return f"{place}@{done.oid}/{table.WEIGHTS}#sha256={said.sha256}"


def write(said: Entry, folder: Path, place: str) -> None:
    """Write the files of a repository: the hand-over as it is, a config.json for timm, and the model card."""
    handover = table.handover_of(said.name)
    for file in (table.WEIGHTS, table.CONFIG):
        shutil.copyfile(handover / file, folder / file)
    options = read_yaml(handover / table.CONFIG)["model"]
    options = {key: value for key, value in options.items() if key not in ("name", "backbone")}
    save_config_for_hf(create_model(said.name), folder / TIMMS_CONFIG, model_args=options)
    (folder / CARD).write_text(card(said, place))


def card(said: Entry, place: str) -> str:
    """Return the model card: what is certified, on which images, and how to load the weights."""
    rows = [
        f"| {NAMES[norm]} | {eps:.4g} | {share:.1f} |"
        for norm, curve in said.certified.items()
        for eps, share in curve.items()
    ]
    return f"""---
license: apache-2.0
library_name: timm
pipeline_tag: image-classification
datasets: [{said.dataset}]
tags: [certified-robustness, adversarial-robustness, vision-transformer, timm]
---
# {said.name}

A robust Vision Transformer, trained and certified by CertiZoo. An image counts as certified if it is classified
correctly and proved: no change of its pixels up to the radius, by any attack, changes the class. The proof covers these
weights in exact arithmetic. Radii are in [0,1] pixels; normalisation is a layer of the model.

First {said.images} test images of {said.dataset}, in per cent. Clean accuracy: {said.clean:.1f}.

| norm | radius | certified accuracy |
|---|--:|--:|
{chr(10).join(rows)}

```python
import zoo  # pip install certizoo; before timm
import timm

model = timm.create_model("{place}", pretrained=True).eval()
```

The certificate belongs to the weights with sha256 `{said.sha256}`. Compare a copy by `sha256sum {table.WEIGHTS}`. To
certify a picture, run `certizoo certify image PICTURE model={said.name}`.
"""


def _reason(error: Exception) -> str:
    """Return what the hub says in one short line. Requests, and so tokens, are not part of it."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    said = getattr(error, "server_message", None) or type(error).__name__
    return " ".join(f"{f'HTTP {status}: ' if status else ''}{said}".split())[:200]
