"""Random draws of a step and of the monitor: equal for both passes of SAM, and for every number of ranks."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from certizoo.attacks import AttackConfig
from tests.tools.trained import Alone
from trainers.objectives import Probe
from trainers.settings import MasksConfig, ObjectiveConfig
from trainers.steps.monitor import by_class, evaluate
from trainers.steps.step import make_probe, sharpness


def test_both_passes_of_sam_drop_the_same_paths() -> None:
    """With an ascent of length 0 both passes have one loss; another draw would change it."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"embed_dim": 16, "depth": 4, "num_heads": 2, "patch_size": 4, "img_size": 8, "in_chans": 1}
    model = zoo.create_model("dp_vit_ti", num_classes=5, drop_path_rate=0.5, **sizes).train()
    losses: list[float] = []

    def watched(measure: Any, *inputs: Any) -> Any:
        out = measure(model, *inputs)
        losses.append(out.sum().item())
        return out

    engine = SimpleNamespace(module=model, precision=nullcontext)
    job = SimpleNamespace(train=SimpleNamespace(sam_rho=1e-30), objective=SimpleNamespace(name="clean"))
    world = SimpleNamespace(device=torch.device("cpu"))
    run: Any = SimpleNamespace(engine=engine, job=job, world=world)
    probe = Probe(watched, lambda x, y: x, model, ObjectiveConfig("clean"))
    batch = torch.rand(8, 1, 8, 8), torch.arange(8) % 5
    handle = model.register_forward_hook(lambda module, inputs, output: losses.append(output.sum().item()))
    with sharpness(run, probe, batch):
        probe.forward(batch[0])
        handle.remove()
        probe.forward(batch[0])
    first, second, _, third = losses
    assert first == second
    assert second != third


@pytest.mark.parametrize("cut", [[8], [4, 4], [3, 3, 2]])
def test_the_monitors_attack_starts_where_the_key_says(cut: list[int]) -> None:
    """Any ranks and batches give the same starts, also for final images without a key."""
    starts: dict[int, float] = {}

    class Start:
        def stronger(self, steps: int) -> "Start":
            return self

        def run(self, module: nn.Module, images: Tensor, labels: Tensor, draws: list[torch.Generator]) -> Tensor:
            drawn = [float(torch.rand((), generator=draw)) for draw in draws]
            starts.update(zip(labels.tolist(), drawn, strict=True))
            return images

    images, batches, first = torch.rand(8, 1, 2, 2), [], 0
    for size in cut:
        keys = [f"key{i}" for i in range(first, first + size)]
        batches.append((keys, images[first : first + size], torch.arange(first, first + size)))
        first += size
    batches.append(([], images[:1], torch.tensor([99])))
    world: Any = Alone()
    world.device = torch.device("cpu")
    attack: Any = Start()
    found = evaluate(nn.Flatten(), batches, attack, 0, world, 100)
    assert found["eval_images"] == 8
    assert found["worst_class_clean_acc"] <= found["clean_acc"]
    assert not any("/" in key for key in found), "100 classes are too many for columns"
    again: list[float] = []
    for key, images_BCHW, label in zip(batches[0][0], images, range(cut[0]), strict=False):
        evaluate(nn.Flatten(), [([key], images_BCHW[None], torch.tensor([label]))], attack, 0, world, 100)
        again.append(starts[label])
    assert len(set(starts.values())) == 9
    assert again == [starts[i] for i in range(cut[0])]


def test_accuracies_of_few_classes_are_columns() -> None:
    counts = torch.tensor([[4.0, 0.0, 2.0], [3.0, 0.0, 2.0], [1.0, 0.0, 0.0]])
    assert by_class(counts) == {
        "worst_class_clean_acc": 0.75, "worst_class_pgd_acc": 0.0,
        "class_clean_acc/0": 0.75, "class_clean_acc/2": 1.0, "class_pgd_acc/0": 0.25, "class_pgd_acc/2": 0.0,
    }  # fmt: skip
    assert set(by_class(torch.ones(3, 21))) == {"worst_class_clean_acc", "worst_class_pgd_acc"}


@pytest.mark.parametrize(("warmup", "lengths"), [(0.0, [1, 1, 1, 1]), (0.5, [0, 0.5, 1, 1])])
def test_the_attack_grows_with_the_training(warmup: float, lengths: list[float]) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))

    @contextmanager
    def attacked() -> Iterator[nn.Module]:
        yield model

    train = SimpleNamespace(attack_warmup=warmup, label_smoothing=0.0)
    attack = AttackConfig(norm="linf", eps=0.1, steps=2, random_start=False)
    job = SimpleNamespace(train=train, attack=attack, masks=MasksConfig(), objective=ObjectiveConfig("pgd_at"), seed=0)
    engine = SimpleNamespace(module=model, attacked=attacked, through=None)
    run: Any = SimpleNamespace(job=job, engine=engine, world=Alone(), total_steps=8)
    run.world.device = torch.device("cpu")
    images, labels = 0.3 + 0.4 * torch.rand(4, 1, 4, 4), torch.arange(4) % 3
    found = [float((make_probe(run, step).attack(images, labels) - images).abs().max()) for step in (0, 2, 4, 7)]
    assert found == pytest.approx([0.1 * length for length in lengths], abs=1e-6)
