"""Clean and robust accuracy on the first test images, counted over all ranks. Legend: images_BCHW, labels_B."""

from collections.abc import Iterable

import torch
from torch import Generator, Tensor, nn

from attacks import AttackConfig
from trainers.engine import World
from trainers.seeds import seed_of

LEAST_STEPS = 10  # a model trained on few attack steps may only look robust to few (catastrophic overfitting)


def evaluate(
    module: nn.Module,
    batches: Iterable[tuple[list[str], Tensor, Tensor]],
    attack: AttackConfig,
    seed: int,
    world: World,
) -> dict[str, float]:
    """{"clean_acc", "pgd_acc", "eval_images"}; the attack takes at least 10 steps. Collective; leaves eval mode on."""
    attack, module = attack.stronger(LEAST_STEPS), module.eval()
    counts_3 = torch.zeros(3, dtype=torch.float64, device=world.device)
    for index, (_, images_BCHW, labels_B) in enumerate(batches):
        images_BCHW, labels_B = images_BCHW.to(world.device), labels_B.to(world.device)
        generator = Generator().manual_seed(seed_of(seed, "evaluate", world.rank, index))
        adversarial_BCHW = attack.run(module, images_BCHW, labels_B, generator)
        right = [correct(module, x_BCHW, labels_B).sum() for x_BCHW in (images_BCHW, adversarial_BCHW)]
        counts_3 += torch.stack([torch.tensor(len(labels_B), device=world.device), *right])
    images, clean, robust = world.sums(counts_3).tolist()
    return {"clean_acc": clean / images, "pgd_acc": robust / images, "eval_images": images}


@torch.no_grad()
def correct(module: nn.Module, images_BCHW: Tensor, labels_B: Tensor) -> Tensor:
    """correct_B; logits that are not finite are wrong, whatever argmax makes of them."""
    logits_BK: Tensor = module(images_BCHW)
    return (logits_BK.argmax(dim=1) == labels_B) & logits_BK.isfinite().all(dim=1)
