"""Protocols: the attacks of an evaluation by name, as `configs/protocol/*.yaml` list them."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

import zoo
from certify.shared.ball import L2, LINF, NORMS
from certizoo import UserError
from certizoo.attacks.attack import Attack
from certizoo.attacks.kinds import make
from certizoo.attacks.transfer import Transfer

Options = Mapping[str, object]


def attack_of(name: str, options: Options, model: nn.Module, classes: int, side: int) -> Attack:
    """Return the attack of one entry, {kind: ..., its settings}, on this model of square images.

    `kind: transfer` finds its points on another model: `source` is the hand-over folder of an undefended model, and
    `attack` an entry of its own.

    Raises UserError naming the entry, also for a model that the attack cannot work on.
    """
    device = next(model.parameters()).device
    try:
        attack = _transfer(options, device) if options.get("kind") == "transfer" else make(options)
        attack.require_model(model, classes, side)
    except UserError as error:
        raise UserError(f"protocol.attacks.{name}: {error}") from None
    return attack


def _transfer(options: Options, device: torch.device) -> Attack:
    source, attack = options.get("source"), options.get("attack")
    if not source or not isinstance(attack, Mapping) or set(options) != {"kind", "source", "attack"}:
        raise UserError(
            "a transfer attack needs the keys source=FOLDER (another model's hand-over) and attack, and no other"
        )
    model, _ = zoo.handover.load(Path(str(source)))
    return Transfer(model.to(device), make(attack))


def covering(attack: Attack, norm: str, pixels: int) -> float | None:
    """Return the smallest radius in the norm whose ball contains that of the attack; None if the attack has no ball.

    An image certified there survives the attack. ||d||_inf <= ||d||_2 <= sqrt(n) ||d||_inf for n numbers per image.
    """
    if attack.eps is None or attack.norm not in NORMS:
        return None
    return outwards(attack.eps * pixels**0.5) if (attack.norm, norm) == (LINF, L2) else attack.eps


def outwards(radius: float) -> float:
    """Return a radius enlarged by more than the rounding of a product and a root."""
    return radius * (1 + 1e-12)
