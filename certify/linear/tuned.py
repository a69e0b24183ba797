"""Lower bounds with the best slopes and planes that a few gradient steps find (alpha-CROWN, Xu et al. 2021).

Enclosures hold for any parameters in [0,1]. So every step's bound is one, rounding included, and the largest counts.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from certify.linear.backward import Bounds
from certify.linear.enclosures.steps import Free

STEPS, RATE, LAST = 40, 0.1, 0.05  # the last step is this share of the first


def tuned(bounds: Bounds, rows_BRJ: Tensor, enough: float = torch.inf) -> Tensor:
    """Return lower bounds of functionals of the logits: (B, R). Stop where all are above `enough`."""
    result = bounds.program.result
    assert result is not None
    rows = rows_BRJ.view(*rows_BRJ.shape[:2], *result.shape)
    free = start(bounds, result.number, *rows.shape[:2])
    return ascend(bounds, result.number, rows, free, enough, STEPS) if free else bounds.lower(result.number, rows)


def start(bounds: Bounds, number: int, batch: int, rows: int) -> dict[int, Free]:
    """Return where the search begins, by the numbers of results."""
    found = {k: relaxed.free(batch, rows) for k, relaxed in enumerate(bounds.relaxed[:number], 1)}
    return {k: free for k, free in found.items() if free}


def ascend(
    bounds: Bounds,
    number: int,
    rows_BR: Tensor,
    free: dict[int, Free],
    enough: float,
    steps: int,
    rate: float = RATE,
    split: dict[int, tuple[Tensor, Tensor]] | None = None,
    seen: dict[int, Tensor] | None = None,
) -> Tensor:
    """Ascend lower bounds and return the largest of each: (B, R).

    Args:
        bounds: the enclosures.
        number: of the result that is bounded.
        rows_BR: functionals of it (B, R, *shape).
        free: parameters of enclosures in [0,1], changed in place to the best of each functional.
        enough: stop where all bounds are above.
        steps: most steps.
        rate: of the first step.
        split: for results z with known signs, these signs (B, *shape), 0 where unknown, and multipliers b >= 0
            (B, R, *shape), changed in place.
        seen: receives the last functionals of the results that are its keys.
    """
    split = split or {}
    leaves = [leaf.requires_grad_(True) for leaves in free.values() for leaf in leaves]
    multipliers = [b.requires_grad_(True) for _, b in split.values()]
    optimiser = torch.optim.Adam([{"params": leaves}, {"params": multipliers}], rate)
    held = [leaf.detach().clone() for leaf in (*leaves, *multipliers)]
    best_BR = torch.full(rows_BR.shape[:2], -torch.inf, dtype=rows_BR.dtype, device=rows_BR.device)
    for step in range(steps + 1):
        with torch.enable_grad():
            added = {k: -sign.unsqueeze(1) * b for k, (sign, b) in split.items()}
            low_BR = bounds.free_lower(number, rows_BR, free, added, seen)
            better_BR = (low_BR.detach() > best_BR) & ~(best_BR > enough)  # so that no functional depends on others
            _hold(held, (*leaves, *multipliers), better_BR)
            best_BR = torch.where(better_BR, low_BR.detach(), best_BR)
            if step == steps or bool((best_BR > enough).all()):
                break
            (-low_BR.clamp_min(-1e30).sum()).backward()
        _update(optimiser, leaves, multipliers, LAST ** (1 / steps))
    for leaf, kept in zip((*leaves, *multipliers), held, strict=True):
        leaf.requires_grad_(False).copy_(kept)
    return best_BR


def _hold(held: list[Tensor], leaves: Iterable[Tensor], better_BR: Tensor) -> None:
    for kept, leaf in zip(held, leaves, strict=True):
        kept.copy_(torch.where(better_BR.view(*better_BR.shape, *(1,) * (leaf.ndim - 2)), leaf.detach(), kept))


def _update(optimiser: torch.optim.Optimizer, leaves: list[Tensor], multipliers: list[Tensor], decay: float) -> None:
    with torch.no_grad():
        for leaf in (*leaves, *multipliers):
            if leaf.grad is not None:
                leaf.grad.nan_to_num_(0.0, 0.0, 0.0)
        optimiser.step()
        optimiser.zero_grad()
        for leaf in leaves:
            leaf.clamp_(0, 1)
        for leaf in multipliers:
            leaf.clamp_(min=0)
    for group in optimiser.param_groups:
        group["lr"] *= decay
