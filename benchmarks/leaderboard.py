"""Our leaderboard entries and the table of weights, from benchmarks/results: `python -m benchmarks.leaderboard`."""

import json
from pathlib import Path
from typing import Any

from benchmarks import weights_table
from benchmarks.record import RESULTS
from certify.leaderboard.entry import Entry
from certify.leaderboard.of_results import entry_of

LEADERBOARD = Path(__file__).parents[1] / "leaderboard"
YEAR = 2026
XEON = "of one core of a 2.5 GHz Xeon"
ATTENTIONS = {  # attention: what it is, minutes of training
    "dp": ("dot-product attention", 7),
    "l2": ("L2 attention", 7),
    "ln": ("Lipschitz-normalised attention", 9),
    "msvp": ("dot-product attention and the MSVP penalty", 7),
    "scsa": ("scaled cosine attention", 10),
}
# name: the results, and what they do not contain; training and commands are those of docs/results.md
MODELS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "cert_vit_c10": (
        ("cert_vit_c10_cifar10_best", "cert_vit_c10_cifar10_best_linf"),
        {"title": "Pre-norm ViT with gated positions, trained for its certificate", "training": f"105 minutes {XEON}"},
    ),
    "cert_gpsa_vit_c10": (
        ("cert_gpsa_vit_c10_cifar10_best",),
        {
            "title": "A convolution, GELU and one block with gated positions, trained for its certificate",
            "training": "94 minutes of one core of a Zen 4, some beside other jobs",
        },
    ),
    "cert_gpsa_vit_c10_gpu": (
        ("cert_gpsa_vit_c10_gpu_cifar10_best",),
        {
            "title": "A wide convolution, GELU and two blocks with gated positions, trained for its certificate",
            "training": "9 minutes of an H200, another training beside it",
        },
    ),
    "cert_stem_vit_c10": (
        ("cert_stem_vit_c10_cifar10_best",),
        {
            "title": "A convolution, GELU and one block that attends by content, trained for its certificate",
            "training": "149 minutes of one core of a Zen 4 and an AMD EPYC beside other jobs",
        },
    ),
    **{
        f"cert_{attention}_vit_c10": (
            (f"cert_{attention}_vit_c10_cifar10_best",),
            {
                "title": f"A convolution, GELU and one block with {title}, trained for its certificate",
                "training": f"{minutes} minutes of one core of an AMD EPYC beside other jobs",
            },
        )
        for attention, (title, minutes) in ATTENTIONS.items()
    },
    "cert_gpsa_vit_imagenette": (
        ("cert_gpsa_vit_imagenette_imagenette_best",),
        {
            "title": "A convolution, GELU and one block with gated positions at 64 pixels, trained for its certificate",
            "training": "24 minutes of one core of an AMD EPYC beside another job",
        },
    ),
    "cert_gpsa_vit_tin": (
        ("cert_gpsa_vit_tin_tinyimagenet_best",),
        {
            "title": "A convolution, GELU and one block with gated positions at 32 pixels, trained for its certificate",
            "training": "55 minutes of one core of an AMD EPYC beside other jobs",
        },
    ),
    "cert_vit_mnist": (
        ("cert_vit_mnist_mnist_best",),
        {
            "title": "One block with gated positions, trained for its certificate on 10,000 images",
            "training": "8 minutes of one core of a Zen 3 beside other jobs",
        },
    ),
}
# the same models as they are served: the results, and the model's entry
SERVED = {
    "cert_vit_c10_float32": (("cert_vit_c10_cifar10_served", "cert_vit_c10_cifar10_served_linf"), "cert_vit_c10"),
    "cert_gpsa_vit_c10_float32": (("cert_gpsa_vit_c10_cifar10_served",), "cert_gpsa_vit_c10"),
    "cert_gpsa_vit_c10_gpu_float32": (("cert_gpsa_vit_c10_gpu_cifar10_served",), "cert_gpsa_vit_c10_gpu"),
}
OURS = MODELS | {name: (files, MODELS[model][1] | {"name": name}) for name, (files, model) in SERVED.items()}


def entry(name: str) -> Entry:
    """Return one entry of OURS."""
    files, said = OURS[name]
    return entry_of([json.loads((RESULTS / f"{file}.json").read_text()) for file in files], year=YEAR, **said)


def text(name: str) -> str:
    return json.dumps(entry(name), indent=2) + "\n"


if __name__ == "__main__":
    weights_table.TABLE.write_text(weights_table.text())
    weights_table.entries.cache_clear()
    for name in OURS:
        (LEADERBOARD / f"{name}.json").write_text(text(name))
