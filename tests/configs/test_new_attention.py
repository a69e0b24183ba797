"""A new attention is one file of code and one YAML file.

In a copy of the tree with these two files added, fresh processes have its models, recipes, training and certificates.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools.folders import FOLDERS
from tests.tools.launching import ROOT, environment

TEMPERED = '''
"""Dot-product attention at a temperature: F(X) = sum_l softmax(tau Q_l K_l^T / sqrt(D / H)) V_l W_O^l."""

from typing import Any

from torch import Tensor

from zoo.attention.softmax.rules import rules_by_split
from zoo.attention.softmax.qkv import qkv_split
from zoo.attention.softmax.module import QKVAttention
from zoo.bounds.rule_table import register


class TemperedAttention(QKVAttention):
    """x (B, N, D) -> (B, N, D)."""

    def __init__(self, dim: int, num_heads: int, tau: float = 0.5, **options: Any) -> None:
        super().__init__(dim, num_heads, **options)
        self.scale = tau * (dim // num_heads) ** -0.5

    def scores(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return q, k, v


VARIANTS = {"tempered": TemperedAttention}


register(TemperedAttention, rules_by_split(qkv_split))  # the rules that hold for every attention of this form
'''
MEAN = '''
"""Mean mixing: F(X) = 1 1^T X W / N. Of no form that is known, and without a rule."""

from torch import Tensor, nn


class MeanMixing(nn.Module):
    """x (B, N, D) -> (B, N, D)."""

    def __init__(self, dim: int, num_heads: int, gain: float = 1.0) -> None:
        super().__init__()
        self.gain, self.proj = gain, nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * self.proj(x).mean(1, keepdim=True).expand_as(x)


VARIANTS = {"mean": MeanMixing}
'''
NOTE = """# @package _global_
# {name}: an attention of tests/configs/test_new_attention.py.
#   deepspeed trainers/adv_train.py +model={name}_vit_ti
model:
  attention: {{name: {name}, {option}: 0.25}}
"""
SMALL = (
    "data=digits", "model.embed_dim=16", "model.depth=2", "model.num_heads=2", "model.patch_size=4", "attack=pgd_l2",
    "train.batch_size=64", "train.max_steps=2", "train.eval_images=0", "registry.enabled=false", "certify.images=4",
    "certify.eps=[0.01]", "certify.headline_eps=0.01",
)  # fmt: skip
# The commands of a user. With `python -c` imports start at the current folder.
BY_HAND = """
import json, torch, zoo
from certizoo import UserError
from certizoo.config.compose import compose_config
from certify import certify
from trainers.job.prepare import prepare

names = zoo.list_models()
tiny = dict(img_size=8, in_chans=1, patch_size=4, embed_dim=16, depth=2, num_heads=2, num_classes=3, global_pool="avg")
found = {"names": [name for name in names if name.startswith(("tempered_", "mean_"))], "composed": {}}
for name in found["names"]:
    found["composed"][name] = compose_config("adv_train", [f"+model={name}"])["model"]
found["option"] = compose_config("adv_train", ["+model=dp_vit_ti", "+attention=tempered"])["model"]["attention"]
words = ["+model=mean_vit_ti", "data=digits", "model.embed_dim=16", "model.depth=2", "model.num_heads=2"]
words += ["model.patch_size=4"]
try:
    prepare(compose_config("std_train", words))
except UserError as refused:
    found["refused"] = str(refused)
found["prepared"] = prepare(compose_config("std_train", [*words, "certify.enabled=false"])).model["name"]
x = torch.rand(4, 1, 8, 8)
for name in ("tempered_vit_ti", "tempered_convit_ti", "mean_vit_ti", "mean_deit_ti"):
    for method in ("lofast", "adjoint"):
        try:
            model = zoo.create_model(name, **tiny)
            c = certify(model, x, model.eval()(x).argmax(-1), eps=1e-6, method=method)
            found[f"{name} {method}"] = c.certified_B.tolist()
        except UserError as refused:
            found[f"{name} {method}"] = str(refused)
print(json.dumps(found))
"""


def run(tree: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run Python in the copied tree, from which alone it can import."""
    surroundings = {key: value for key, value in environment().items() if key != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=tree, env=surroundings, text=True, capture_output=True, timeout=180
    )


@pytest.fixture(scope="module")
def tree(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the product and its configurations, and add two attentions and the digits."""
    root = tmp_path_factory.mktemp("tree")
    for folder in [*FOLDERS, "configs"]:
        shutil.copytree(ROOT / folder, root / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name, code, option in (("tempered", TEMPERED, "tau"), ("mean", MEAN, "gain")):
        (root / "zoo" / "attention" / f"{name}.py").write_text(code)
        (root / "configs" / "attention" / f"{name}.yaml").write_text(NOTE.format(name=name, option=option))
    shutil.copytree(digits, root / "data" / "digits")
    return root


@pytest.mark.slow
def test_it_has_models_recipes_and_certificates(tree: Path) -> None:
    done = run(tree, "-c", BY_HAND)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert "train without certificates by certify.enabled=false" in found["refused"]
    sizes = {"vit_ti", "vit_s", "vit_b", "vit_l"}
    assert {f"{name}_{size}" for name in ("tempered", "mean") for size in sizes} <= set(found["names"])
    assert {"tempered_deit_s", "tempered_convit_ti", "tempered_swin_t"} <= set(found["names"])
    assert found["composed"] == {name: {"name": name} for name in found["names"]}
    assert found["option"] == {"name": "tempered", "tau": 0.25}
    assert found["prepared"] == "mean_vit_ti"
    for method in ("lofast", "adjoint"):
        assert found[f"tempered_vit_ti {method}"] == [True] * 4, method
        assert "MeanMixing): no rule is proved" in found[f"mean_vit_ti {method}"]
        assert found[f"mean_deit_ti {method}"].startswith("no model 'mean_deit_ti'; nearest: ")
    assert found["tempered_convit_ti adjoint"] == [True] * 4


@pytest.mark.slow
def test_it_trains_as_typed_and_is_certified(tree: Path) -> None:
    words = ["+model=tempered_vit_ti", "name=tempered", "model.global_pool=avg", "certify.method=adjoint"]
    done = run(tree, "trainers/std_train.py", *words, *SMALL)
    assert done.returncode == 0, done.stderr
    folder = tree / "runs" / "tempered"
    assert [row for line in (folder / "metrics.jsonl").read_text().splitlines() if "loss" in (row := json.loads(line))]
    summary = json.loads((folder / "certificate" / "certificate.json").read_text())
    assert (summary["method"], summary["images"]) == ("adjoint", 4)


@pytest.mark.slow
def test_it_is_in_the_overview(tree: Path) -> None:
    done = run(tree, "-m", "zoo", "show", "tempered_vit_ti")
    assert done.returncode == 0, done.stderr
    assert "TemperedAttention" in done.stdout
    assert "lofast: yes" in done.stdout
    assert "adjoint: yes" in done.stdout


def test_nothing_else_changed(tree: Path) -> None:
    """At the end the copy differs from the tree by the two files of each attention."""
    changed = set()
    for folder in [*FOLDERS, "configs"]:
        for path in (tree / folder).rglob("*"):
            if path.is_file() and path.suffix in (".py", ".yaml"):
                original = ROOT / path.relative_to(tree)
                if not original.is_file() or original.read_bytes() != path.read_bytes():
                    changed.add(path.relative_to(tree).as_posix())
    assert changed == {
        f"{place}.{end}"
        for name in ("tempered", "mean")
        for place, end in ((f"zoo/attention/{name}", "py"), (f"configs/attention/{name}", "yaml"))
    }
