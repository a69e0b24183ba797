"""Clean and robust accuracy on the first test images, counted over all ranks. Legend: images_BCHW, labels_B."""

import logging
import math
from collections.abc import Iterable, Iterator
from itertools import chain, islice, repeat

import torch
from torch import Generator, Tensor, nn

from certizoo.attacks import AttackConfig
from certizoo.shards import eval_loader
from trainers.engine.world import World
from trainers.job.job import Job
from trainers.seeds import seed_of
from zoo.models.sentences import by_length

log = logging.getLogger(__name__)
Batch = tuple[list[str], Tensor, Tensor]
BLANK = ""  # key of an image that does not count
FEW_CLASSES = 20  # whose accuracies are columns of their own in the rows
LEAST_STEPS = 10  # a model trained on few attack steps may look robust to few steps only (catastrophic overfitting)


def evaluate(
    module: nn.Module,
    batches: Iterable[Batch],
    attack: AttackConfig,
    seed: int,
    world: World,
    num_classes: int,
) -> dict[str, float]:
    """Return {"clean_acc", "pgd_acc", "eval_images"}, and accuracies of classes.

    These are the lowest ones and, of at most FEW_CLASSES, all: class_clean_acc/3. The rank's log gets all. Collective;
    leaves eval mode on. The attack takes at least 10 steps. An image's start depends on its key, not on its rank or
    batch.
    """
    attack, module = attack.stronger(LEAST_STEPS), module.eval()
    counts_3K = torch.zeros(3, num_classes, dtype=torch.float64, device=world.device)
    for keys, images_BCHW, labels_B in as_taken(module, batches, world):
        draws = [Generator().manual_seed(seed_of(seed, "evaluate", key)) for key in keys or [BLANK]]
        adversarial_BCHW = attack.run(module, images_BCHW, labels_B, draws)
        right = [correct(module, x_BCHW, labels_B) for x_BCHW in (images_BCHW, adversarial_BCHW)]
        if keys:  # a batch without keys only keeps the ranks synchronised
            counts_3K.index_add_(1, labels_B, torch.stack([torch.ones_like(right[0]), *right]).to(counts_3K))
    counts_3K = world.sums(counts_3K)
    images, clean, robust = counts_3K.sum(1).tolist()
    found = {"clean_acc": clean / images, "pgd_acc": robust / images, "eval_images": images}
    return found | by_class(counts_3K)


def by_class(counts_3K: Tensor) -> dict[str, float]:
    """Return the accuracies of the classes that occur; `counts_3K`: images, and those right, clean and attacked."""
    classes = counts_3K[0].nonzero().flatten().tolist()
    least, each = dict[str, float](), dict[str, float]()
    for name, right_K in zip(("clean_acc", "pgd_acc"), counts_3K[1:], strict=True):
        shares = (right_K / counts_3K[0])[classes].tolist()
        log.info("%s by class: %s", name, " ".join(f"{share:.3f}" for share in shares))
        least[f"worst_class_{name}"] = min(shares)
        each |= {f"class_{name}/{index}": share for index, share in zip(classes, shares, strict=True)}
    return least | (each if counts_3K.shape[1] <= FEW_CLASSES else {})


def as_taken(module: nn.Module, batches: Iterable[Batch], world: World) -> Iterator[Batch]:
    """Iterate over the batches on the rank's device; those of sentences embedded, one a length."""
    for keys, images_BCHW, labels_B in batches:
        yield from by_length(module, keys, images_BCHW.to(world.device), labels_B.to(world.device))


@torch.no_grad()
def correct(module: nn.Module, images_BCHW: Tensor, labels_B: Tensor) -> Tensor:
    """Return correct_B; logits that are not finite count as wrong, whatever their argmax."""
    logits_BK: Tensor = module(images_BCHW)
    return (logits_BK.argmax(dim=1) == labels_B) & logits_BK.isfinite().all(dim=1)


def monitor_batches(job: Job, micro_batch: int, world: World) -> Iterator[Batch]:
    """Iterate over this rank's part of the first train.eval_images test images.

    Every rank gets the same number of batches, perhaps without keys at the end: at ZeRO 3 ranks gather weights
    together.
    """
    assert job.test_set is not None, "callers ask only where there are test shards"
    limit = min(job.train.eval_images, job.test_set.samples)
    loader = eval_loader(
        job.test_set, job.data, batch_size=micro_batch, limit=limit, rank=world.rank, world_size=world.size
    )
    blank_BCHW = torch.zeros(1, job.model["in_chans"], job.data.img_size, job.data.img_size)
    blank: Batch = ([], blank_BCHW, torch.zeros(1, dtype=torch.int64))
    return islice(chain(loader, repeat(blank)), math.ceil(limit / world.size / micro_batch))
