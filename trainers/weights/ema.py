"""The exponential moving average of the weights, which `train.ema_decay` > 0 evaluates and hands over.

    e_0 = w_0,   e_t = d_t e_{t-1} + (1 - d_t) w_t,   d_t = min(decay, (1 + t) / (10 + t))

w_t: weights after step t. d_t grows to the decay, so that the first weights do not dominate a short run (`num_updates`
of TensorFlow's ExponentialMovingAverage; averaging helps adversarial training: Gowal et al. 2020,
https://arxiv.org/abs/2010.03593). Buffers are not averaged: they are the model's. Each rank holds the whole average and
updates it alike, from whole weights (ZeRO 0-2); one safetensors file of a checkpoint stores it.
"""

from pathlib import Path

import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

import zoo
from trainers.engine.engine import Engine
from trainers.job.job import Job
from trainers.weights import states

FILE = "ema.safetensors"


class Average:
    """The average; `module` holds the averaged weights, a separate model that is never trained."""

    def __init__(self, job: Job, engine: Engine) -> None:
        self.decay = job.train.ema_decay
        self.module: nn.Module = zoo.create_model(**job.model).requires_grad_(False)
        self.module.load_state_dict(engine.whole_state())
        self.module.to(engine.world.device)

    @torch.no_grad()
    def update(self, engine: Engine, step: int) -> None:
        """Compute e_t from e_{t-1}; `step` is t, from 1."""
        decay = min(self.decay, (1 + step) / (10 + step))
        get_ema_multi_avg_fn(decay)(list(self.module.parameters()), list(engine.module.parameters()), step)
        for mine, its in zip(self.module.buffers(), engine.module.buffers(), strict=True):
            mine.copy_(its)

    def save(self, folder: Path) -> Path:
        """Write folder/ema.safetensors on one rank."""
        states.write_file(folder / FILE, self.module.state_dict())
        return folder / FILE

    def load(self, folder: Path) -> None:
        """Load the average on every rank. Raises UserError if the file is damaged or of another model."""
        self.module.load_state_dict(states.read_file(folder / FILE, self.module.state_dict()))
