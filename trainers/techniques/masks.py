"""The masks of Mo et al. 2022 (https://arxiv.org/abs/2210.07540), only in the attack of adversarial training.

    ARD  attention random dropping: the attack's gradient skips attention branches, x + F(x) -> x + [F(x)]
    PRM  perturbation random masking: delta -> M delta before each gradient, M = 0 on a random share of the patches

Each branch is skipped, and each patch masked, with probability 1 - t / warmup, t the share of the training that is
done: all at the start, none after `warmup`. ([.] means without gradient. Their code also drops the MLP's branch, since
both branches share one drop-path module there; the paper names attention only.)

Letters: B images, C channels, H x W pixels, P patch size.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Generator, Tensor, nn

from certizoo.attacks.loop import Disturb
from trainers.model_parts import attentions_of
from trainers.settings import MasksConfig


@contextmanager
def masked(model: nn.Module, config: MasksConfig, progress: float, generator: Generator) -> Iterator[Disturb | None]:
    """Enable ARD in the block and yield PRM's change of the attack's points (None: no change).

    Draws come from `generator`.
    """
    share = config.share(progress)
    with ExitStack() as stack:
        if config.ard and share:

            def drop(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
                return output.detach() if torch.rand((), generator=generator) < share else output

            for attention in attentions_of(model):
                stack.enter_context(attention.register_forward_hook(drop))

        def mask(images_BCHW: Tensor, x_BCHW: Tensor) -> Tensor:
            embed: Any = model.get_submodule("patch_embed")
            return torch.lerp(images_BCHW, x_BCHW, patches(x_BCHW, embed.patch_size[0], share, generator))

        yield mask if config.prm and share else None


def patches(x_BCHW: Tensor, size: int, share: float, generator: Generator) -> Tensor:
    """Return M (1, 1, H, W): 0 on a share of the patches, rounded down, the same for all images; 1 elsewhere."""
    rows, columns = (side // size for side in x_BCHW.shape[2:])
    kept = torch.ones(rows * columns)
    kept[torch.randperm(rows * columns, generator=generator)[: int(share * rows * columns)]] = 0
    grid_HW = kept.view(rows, columns).repeat_interleave(size, 0).repeat_interleave(size, 1)
    return grid_HW[None, None].to(x_BCHW)
