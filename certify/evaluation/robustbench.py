"""RobustBench (Croce et al. 2021): the entry of its leaderboard, and the model as its benchmark takes it.

from robustbench import benchmark
benchmark(load_model("NAME@champion"), dataset="cifar10", threat_model="Linf", eps=8 / 255)
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn

import zoo
from certify.rows.intervals import eps_words
from certizoo.attacks.attack import Attack
from certizoo.attacks.auto import AutoAttack
from certizoo.norms import NAMES


def load_model(reference: str) -> nn.Module:
    """Return the model of a hand-over folder, or of a published version NAME@ALIAS.

    It maps images (B, C, H, W) in [0,1] to logits.
    """
    folder = Path(reference)
    if not folder.is_dir():
        from certizoo.registry import browse

        folder = browse.download(reference)
    model, _ = zoo.handover.load(folder)
    return model


def entries(summary: Mapping[str, Any], attacks: Mapping[str, Attack]) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield (threat model, entry) for every complete, standard AutoAttack.

    Entries have the keys of RobustBench's `model_info/<dataset>/<threat model>/<name>.json`; those that only the
    authors know are left to be filled in. Accuracies are those of this evaluation's images, in percent; RobustBench
    takes 10,000 images of CIFAR, 5,000 of ImageNet.
    """
    for name, attack in attacks.items():
        if isinstance(attack, AutoAttack) and attack == AutoAttack(attack.norm, attack.eps, seed=attack.seed):
            robust = f"{100 * summary['accuracy'][name]['accuracy']:.2f}"
            yield (
                NAMES[attack.norm],
                {
                    "link": "",
                    "name": summary["model"]["name"],
                    "authors": "",
                    "additional_data": False,
                    "number_forward_passes": 1,
                    "dataset": summary["dataset"],
                    "venue": "Unpublished",
                    "architecture": summary["model"]["name"],
                    "eps": eps_words(attack.eps),
                    "clean_acc": f"{100 * summary['clean']:.2f}",
                    "reported": robust,
                    "autoattack_acc": robust,
                    "unreliable": bool(summary["flags"]),
                    "footnote": f"{summary['images']} images, list sha256 {summary['image_list_sha256']}",
                },
            )
