"""The only module that imports DeepSpeed (ZeRO stages 0-3, https://arxiv.org/abs/1910.02054); opens the process group.

Attacks never use the engine: `torch.autograd.grad` on `engine(x)` fails at stages 0-2 and is silently wrong at stage 3.
They use `engine.module`, whose modules gather their own weights at stage 3; only the training pass uses the engine. An
objective with input gradients in its loss takes them inside that one pass (`Engine.through`): the engine hooks into the
outputs and into the gradients of the weights, and the inner gradient touches neither. Stage 3 is refused for such
objectives (trainers/job/compatibility.py), because the second derivative needs weights that are freed by then.

At stage 3 weights exist only while their block runs. Penalties on weights have modules of their own (wrappers.py); code
that reads all weights gathers them one by one.

Weights, gradients and their sums over micro-batches and ranks are float32 in every precision: bf16 is an autocast
around the passes. Penalties on weights are computed outside it, so that the logged penalty is the one that is applied.
Added to the loss's gradient in bfloat16, which has 8 significant bits, a small penalty's gradient would round away.
"""

import logging
import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise DeepSpeed warns on every rank that it found none
# Compiled code is cached as pickles: keep it out of /tmp, torch's default, where other users can write.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path.home() / ".cache" / "certizoo" / "compiled"))
# Deprecated names that DeepSpeed calls, on each rank.
warnings.filterwarnings("ignore", "`?torch.distributed", FutureWarning)

import certizoo.compat  # noqa: E402, F401  (repairs torchvision before timm imports it)
from certizoo.imports import absent  # noqa: E402

with absent("mlflow"):  # saves half a second; only DeepSpeed's autotuner uses it, which is a separate command
    import deepspeed
    import deepspeed.ops
from deepspeed.ops.op_builder.all_ops import ALL_OPS  # noqa: E402

from certizoo import UserError  # noqa: E402
from certizoo.memory import keep_freed_memory  # noqa: E402
from trainers import ranks  # noqa: E402
from trainers.engine.optimizers import make_optimizer  # noqa: E402
from trainers.engine.share import Share  # noqa: E402
from trainers.engine.world import World  # noqa: E402
from trainers.engine.wrappers import EngineModel, recompute_blocks_  # noqa: E402
from trainers.settings import DeepSpeedConfig, OptimizerConfig, TrainConfig  # noqa: E402

logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
SLACK = 1.0  # minutes that collectives wait longer than the watchdog, whose message says where a rank hangs
LINEAR = torch.nn.functional.linear
KEPT = ContextVar("KEPT", default=False)
BUCKET = 500_000_000  # maximum number of gradient entries reduced over ranks at once
DISABLE = "TORCHDYNAMO_DISABLE"


@contextmanager
def uncompiled() -> Iterator[None]:
    """Disable `torch.compile` for the block: it then returns functions unchanged."""
    before = os.environ.get(DISABLE)
    os.environ[DISABLE] = "1"
    try:
        yield
    finally:
        del os.environ[DISABLE]
        if before is not None:
            os.environ[DISABLE] = before


with uncompiled():  # it compiles at import, which takes every run 2 s, for code that no optimiser here calls
    import deepspeed.runtime.zero.muon.original_muon


def start(timeout_minutes: float) -> World:
    """Join the process group: NCCL on GPUs, gloo otherwise. Without a launcher the world has one rank."""
    rank, local, size = ranks.rank(), ranks.local_rank(), ranks.world_size()
    os.environ.setdefault("LOCAL_RANK", str(local))  # DeepSpeed requires it
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", local) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    else:
        keep_freed_memory()
        # DeepSpeed would compile a shared-memory kernel for inference here, which needs a C++ compiler.
        deepspeed.ops.__compatible_ops__ = dict.fromkeys(ALL_OPS, False)
    if dist.is_initialized():
        return World(rank, size, device)
    patience = timedelta(minutes=timeout_minutes + SLACK)  # a rank that waits longer for the others fails
    store = None if "MASTER_ADDR" in os.environ else dist.HashStore()
    # Without a device, NCCL guesses the GPU and prints a warning each time.
    backend, bound = ("nccl", device) if gpu else ("gloo", None)
    try:
        dist.init_process_group(backend, timeout=patience, store=store, rank=rank, world_size=size, device_id=bound)
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        port = os.environ["MASTER_PORT"]
        raise UserError(
            f"port {port} is in use, perhaps by another run; choose a free one: deepspeed --master_port=29501 ..."
        ) from None
    deepspeed.init_distributed(timeout=patience, auto_mpi_discovery=False, verbose=False)
    return World(rank, size, device)


def stop() -> None:
    """Leave the group together: a process that exits with a live group may be aborted at its end."""
    dist.barrier()
    torch.nn.functional.linear = LINEAR  # ZeRO 3 replaces this function, and a certificate does not detect it
    if not KEPT.get():
        dist.destroy_process_group()


@contextmanager
def kept() -> Iterator[None]:
    """Keep the process group through several runs of one process.

    DeepSpeed keeps the first group of a process forever. Inside the block `stop` only waits and `start` finds the group
    again; the last `stop` comes after the block.
    """
    token = KEPT.set(True)
    try:
        yield
    finally:
        KEPT.reset(token)


def ds_config(train: TrainConfig, settings: DeepSpeedConfig, world_size: int, weights: int) -> dict[str, Any]:
    """Return DeepSpeed's configuration, with every default that changes results set explicitly."""
    return {
        "train_batch_size": train.batch_size,
        "train_micro_batch_size_per_gpu": train.micro_batch(world_size),
        "gradient_accumulation_steps": train.accumulation(world_size),
        "gradient_clipping": train.clip_grad,  # the default of 0.19 clips at 1.0
        "zero_optimization": {
            "stage": settings.stage,
            "reduce_bucket_size": min(weights, BUCKET),  # the bucket is allocated at full size whatever the model needs
            "stage3_param_persistence_threshold": settings.persistent_below,
            "stage3_max_live_parameters": settings.live_parameters,
            "stage3_max_reuse_distance": settings.live_parameters,
            "offload_optimizer": {"device": "cpu" if settings.offload_optimizer else "none"},
        },
        "zero_force_ds_cpu_optimizer": False,  # required if the optimiser is offloaded
        "zero_allow_untested_optimizer": True,  # torch's and timm's optimisers; no kernel is compiled
        "steps_per_print": 2**62,
        "wall_clock_breakdown": False,
    }


class Engine:
    """A model, its optimiser and its partition over ranks.

    One optimiser step is `accumulation` x (forward, backward, step).

    Args:
        owners: the modules that `of_weights` will be called with.
    """

    def __init__(
        self,
        model: nn.Module,
        owners: Sequence[nn.Module],
        train: TrainConfig,
        optimizer: OptimizerConfig,
        settings: DeepSpeedConfig,
        world: World,
    ) -> None:
        self.world, self.train_config = world, train
        self._stage = settings.stage
        self.accumulation = train.accumulation(world.size)
        self.micro_batch = train.micro_batch(world.size)
        if train.grad_checkpointing:
            recompute_blocks_(model)
        # Whole at stages 0-2, so that a penalty handles all layers in one batch; gathered one by one at stage 3.
        wrapped = EngineModel(model.to(world.device), owners if settings.stage == 3 else ())
        weights = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        self._engine, *_ = deepspeed.initialize(
            model=wrapped,
            optimizer=make_optimizer(model, optimizer),
            config=ds_config(train, settings, world.size, weights),
            dist_init_required=False,
        )
        self._gathered = {each.owner: each for each in wrapped.gathered}
        # Not "leaf modules": those reduce gradients during an attack as well.
        for module, owner in wrapped.gathered_around():
            for parameter in owner.parameters():
                deepspeed.zero.register_external_parameter(module, parameter)
        if train.compile:
            model.compile()

    @property
    def module(self) -> nn.Module:
        """Return the bare model, for attacks, penalties and evaluation."""
        module: nn.Module = self._engine.module.model
        return module

    def train(self) -> None:
        """Enable dropout and drop-path."""
        self._engine.train()

    def precision(self) -> AbstractContextManager[None]:
        """Return the autocast context of every forward pass.

        With bf16 only matrix products are bfloat16. Weights, images, their normalisation and the residual stream stay
        float32: bfloat16 keeps 8 bits, which would round a perturbation of a few 1/255 away.
        """
        return self._autocast(self.train_config.precision)

    @contextmanager
    def _autocast(self, precision: str) -> Iterator[None]:
        # At stage 3 a weight is freed after its block, and its bfloat16 copy must be freed as well.
        cached = self._stage < 3
        device, narrow = self.world.device.type, precision == "bf16"
        # On a CPU the backward pass of the fused kernel takes up to 5 times as long in bfloat16 as step by step for few
        # tokens, and as long for 200 tokens: benchmarks/bench_layers.py.
        stepwise = sdpa_kernel(SDPBackend.MATH) if narrow and device == "cpu" else nullcontext()
        with torch.autocast(device, torch.bfloat16, enabled=narrow, cache_enabled=cached), stepwise:
            yield

    @contextmanager
    def attacked(self) -> Iterator[nn.Module]:
        """Yield the model for attacks on the training batch, in train.attack_precision."""
        with self._autocast(self.train_config.attack_precision or self.train_config.precision):
            yield self.module

    def through(self, measure: Callable[..., Any], *inputs: Any) -> Any:
        """Run the training pass: measure(model, *inputs), tensors that may enter the loss."""
        return self._engine(self._in_precision, measure, *inputs)

    def _in_precision(self, model: nn.Module, measure: Callable[..., Any], *inputs: Any) -> Any:
        """Run inside the engine's forward: on a GPU DeepSpeed disables an autocast that was enabled outside."""
        with self.precision():
            return measure(model, *inputs)

    def of_weights(self, owners: Iterable[nn.Module], measure: Callable[[nn.Module], Tensor]) -> Tensor:
        """Return measure(all owners), a scalar sum over owners, differentiable in the weights."""
        if not self._gathered:
            return measure(nn.ModuleList(owners))
        total = torch.zeros((), device=self.world.device, requires_grad=True)
        for owner in owners:
            total = self._gathered[owner](total, measure)
        return total

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of loss / accumulation."""
        self._engine.backward(loss)

    def step(self, lr: float, momentum: float | None) -> None:
        """Count a micro-batch; after the last one of an optimiser step, clip, update with `lr` and clear gradients.

        Args:
            momentum: of this step, the first beta of AdamW; None keeps the optimiser's own.
        """
        for group in self._engine.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)  # optimizer.layer_decay
            if momentum is not None and "betas" in group:
                group["betas"] = (momentum, group["betas"][1])
            elif momentum is not None:
                group["momentum"] = momentum
        self._engine.step()

    def updated(self) -> bool:
        """Return False if the gradient of the last `step` was not finite.

        The update was then skipped, or it broke the weights.
        """
        norm = self._engine.get_global_grad_norm()  # -1 if it is not finite
        return bool(self._engine.was_step_applied()) and (norm is None or 0 <= float(norm) < math.inf)

    def gradient_norm(self) -> dict[str, float]:
        """Return {"grad_norm": L2 norm of the last step's whole gradient before it was clipped}; {} at ZeRO 0."""
        norm = self._engine.get_global_grad_norm()
        return {} if norm is None else {"grad_norm": float(norm)}

    def finite(self) -> bool:
        """Return True if all weights are finite. Collective; weights and answer are the same on every rank."""
        sums = torch.stack([weight.double().sum() for _, weight in self.whole_weights()])
        return bool(sums.isfinite().all())

    def whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Iterate over (name, whole weight) as in the model. Collective; each weight is gathered only for its turn."""
        for name, parameter in self.module.named_parameters():
            with deepspeed.zero.GatheredParameters([parameter]):
                yield name, parameter.detach()

    def share(self) -> Share:
        """Return this rank's share of weights and optimiser state, to be saved or restored."""
        return Share(self.module, self._engine.optimizer, self._stage, self.world.rank)

    @contextmanager
    def restoring(self) -> Iterator[Share]:
        """Yield the share to be overwritten; afterwards the model has its float32 weights. Collective.

        DeepSpeed's own `load_checkpoint` unpickles, so it is not used.
        """
        outer = self._engine.optimizer
        if self._stage == 3:
            outer.checkpoint_event_prologue()  # free gathered weights
        with torch.no_grad():
            yield self.share()
            if self._stage in (1, 2):
                outer.update_lp_params()
            elif self._stage == 3:
                for group in range(len(outer.fp16_groups)):
                    outer._reassign_or_swap_out_partitioned_parameters(group)
                outer.checkpoint_event_epilogue()

    def whole_state(self) -> dict[str, Tensor]:
        """Return the state dict on the CPU. Collective."""
        state = {key: value.detach().cpu() for key, value in self.module.state_dict().items()}
        return state | {name: weight.cpu() for name, weight in self.whole_weights()}
