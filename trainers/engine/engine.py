"""The one door to DeepSpeed (ZeRO stages 0-3, https://arxiv.org/abs/1910.02054), and to the process group under it.

Attacks never go through the engine: `torch.autograd.grad` on `engine(x)` fails at stages 0-2 and is silently wrong at
stage 3. They use `engine.module`, whose modules gather their weights themselves at stage 3; only the training pass uses
the engine. An objective that needs input gradients in its loss takes them inside that one pass (`Engine.through`): the
engine hooks into what comes out of it, and into the gradients of the weights, neither of which the inner gradient
touches. Stage 3 is refused (trainers/job/compatibility.py): the second derivative needs weights that are freed then.

At stage 3 weights exist only while their block runs. Penalties on weights have modules of their own (wrappers.py); what
reads all weights gathers them one by one.

Weights, gradients and their sums over micro-batches and ranks are float32 whatever a pass computes in: bf16 is an
autocast around the passes. Penalties on weights are taken outside it. So what is logged of a penalty is what reaches
the weights: added to the loss's gradient in bfloat16, of 8 bits, the gradient of a small penalty would be rounded away.
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
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or DeepSpeed says on every rank that it found none
# Pickles of compiled code: not below /tmp, torch's own choice, where others may be first.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path.home() / ".cache" / "certizoo" / "compiled"))
warnings.filterwarnings("ignore", "`?torch.distributed", FutureWarning)  # old names that DeepSpeed calls, on each rank

import certizoo.compat  # noqa: E402, F401  (repairs torchvision before timm imports it)
from certizoo.imports import absent  # noqa: E402

with absent("mlflow"):  # half a second, for DeepSpeed's autotuner, which is a command of its own
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
SLACK = 1.0  # minutes that collectives wait longer than the watchdog, whose message says where
LINEAR = torch.nn.functional.linear
KEPT = ContextVar("KEPT", default=False)
BUCKET = 500_000_000  # gradients that are summed over ranks at once, at most
DISABLE = "TORCHDYNAMO_DISABLE"


@contextmanager
def uncompiled() -> Iterator[None]:
    """`torch.compile` gives functions back as they are: it reads this variable whenever it is called."""
    before = os.environ.get(DISABLE)
    os.environ[DISABLE] = "1"
    try:
        yield
    finally:
        del os.environ[DISABLE]
        if before is not None:
            os.environ[DISABLE] = before


with uncompiled():  # it compiles at import, and every run imports it: 2 s for what no optimiser here calls
    import deepspeed.runtime.zero.muon.original_muon


def start(timeout_minutes: float) -> World:
    """Join the process group: NCCL on GPUs, gloo otherwise. Without a launcher: a world of one."""
    rank, local, size = ranks.rank(), ranks.local_rank(), ranks.world_size()
    os.environ.setdefault("LOCAL_RANK", str(local))  # DeepSpeed insists
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", local) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    else:
        keep_freed_memory()
        # DeepSpeed would compile a shared-memory kernel here, for inference, with a C++ compiler that may not exist.
        deepspeed.ops.__compatible_ops__ = dict.fromkeys(ALL_OPS, False)
    if dist.is_initialized():
        return World(rank, size, device)
    patience = timedelta(minutes=timeout_minutes + SLACK)  # a rank that waits longer for the others ends with an error
    store = None if "MASTER_ADDR" in os.environ else dist.HashStore()
    backend, bound = ("nccl", device) if gpu else ("gloo", None)  # unbound, NCCL guesses the GPU, and says so each time
    try:
        dist.init_process_group(backend, timeout=patience, store=store, rank=rank, world_size=size, device_id=bound)
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        port = os.environ["MASTER_PORT"]
        raise UserError(
            f"port {port} is taken, by another run perhaps; choose one: deepspeed --master_port=29501 ..."
        ) from None
    deepspeed.init_distributed(timeout=patience, auto_mpi_discovery=False, verbose=False)
    return World(rank, size, device)


def stop() -> None:
    """Leave together: a process that exits with a live group may be aborted in its last moment."""
    dist.barrier()
    torch.nn.functional.linear = LINEAR  # ZeRO 3 leaves one of its own there, and a certificate is of torch's
    if not KEPT.get():
        dist.destroy_process_group()


@contextmanager
def kept() -> Iterator[None]:
    """Around several runs of one process: `stop` only waits, `start` finds the group again. DeepSpeed keeps the first
    group of a process for ever. The last `stop` comes after it."""
    token = KEPT.set(True)
    try:
        yield
    finally:
        KEPT.reset(token)


def ds_config(train: TrainConfig, settings: DeepSpeedConfig, world_size: int, weights: int) -> dict[str, Any]:
    """DeepSpeed's own configuration for so many weights, nothing left to its defaults that changes results."""
    return {
        "train_batch_size": train.batch_size,
        "train_micro_batch_size_per_gpu": train.micro_batch(world_size),
        "gradient_accumulation_steps": train.accumulation(world_size),
        "gradient_clipping": train.clip_grad,  # left out, 0.19 clips at 1.0
        "zero_optimization": {
            "stage": settings.stage,
            "reduce_bucket_size": min(weights, BUCKET),  # it is allocated, whatever the model needs of it
            "stage3_param_persistence_threshold": settings.persistent_below,
            "stage3_max_live_parameters": settings.live_parameters,
            "stage3_max_reuse_distance": settings.live_parameters,
            "offload_optimizer": {"device": "cpu" if settings.offload_optimizer else "none"},
        },
        "zero_force_ds_cpu_optimizer": False,  # likewise where the optimiser is offloaded
        "zero_allow_untested_optimizer": True,  # torch's and timm's; no kernel is compiled
        "steps_per_print": 2**62,
        "wall_clock_breakdown": False,
    }


class Engine:
    """A model, its optimiser and its partition over ranks. One optimiser step is `accumulation` x (forward, backward,
    step).

    Args: owners: the modules that `of_weights` will be asked about.
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
        # Whole at stages 0-2, so that a penalty takes all layers in one batch; at stage 3 gathered one by one.
        wrapped = EngineModel(model.to(world.device), owners if settings.stage == 3 else ())
        weights = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        self._engine, *_ = deepspeed.initialize(
            model=wrapped,
            optimizer=make_optimizer(model, optimizer),
            config=ds_config(train, settings, world.size, weights),
            dist_init_required=False,
        )
        self._gathered = {each.owner: each for each in wrapped.gathered}
        for module, owner in wrapped.gathered_around():  # no "leaf modules": they reduce gradients in an attack as well
            for parameter in owner.parameters():
                deepspeed.zero.register_external_parameter(module, parameter)
        if train.compile:
            model.compile()

    @property
    def module(self) -> nn.Module:
        """The model itself, for attacks, penalties and evaluation."""
        module: nn.Module = self._engine.module.model
        return module

    def train(self) -> None:
        """Dropout and drop-path on."""
        self._engine.train()

    def precision(self) -> AbstractContextManager[None]:
        """Around every forward. In bf16 it is matrix products that are bfloat16; weights, images, what normalises them
        and the sum that runs through the blocks are float32: bfloat16 keeps 8 bits, which would round a perturbation of
        a few 1/255 away."""
        return self._autocast(self.train_config.precision)

    @contextmanager
    def _autocast(self, precision: str) -> Iterator[None]:
        # At stage 3 a weight is given back after its block, and its copy in bfloat16 must go as well.
        cached = self._stage < 3
        device, narrow = self.world.device.type, precision == "bf16"
        # Back through the fused kernel takes a CPU up to 5 times as long in bfloat16 as step by step (few tokens; with
        # 200 it is as fast): benchmarks/bench_layers.py.
        stepwise = sdpa_kernel(SDPBackend.MATH) if narrow and device == "cpu" else nullcontext()
        with torch.autocast(device, torch.bfloat16, enabled=narrow, cache_enabled=cached), stepwise:
            yield

    @contextmanager
    def attacked(self) -> Iterator[nn.Module]:
        """The model as attacks on the training batch see it: in train.attack_precision."""
        with self._autocast(self.train_config.attack_precision or self.train_config.precision):
            yield self.module

    def through(self, measure: Callable[..., Any], *inputs: Any) -> Any:
        """The training pass: measure(model, *inputs), tensors that the loss may be made of."""
        return self._engine(self._in_precision, measure, *inputs)

    def _in_precision(self, model: nn.Module, measure: Callable[..., Any], *inputs: Any) -> Any:
        """Within the engine's forward: on a GPU DeepSpeed turns an autocast off that was on before it."""
        with self.precision():
            return measure(model, *inputs)

    def of_weights(self, owners: Iterable[nn.Module], measure: Callable[[nn.Module], Tensor]) -> Tensor:
        """measure(all owners), a scalar, a sum over owners, differentiable in the weights."""
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
        """Count a micro-batch; after the last one of an optimiser step, clip, update with `lr`, clear gradients.
        momentum: that of the step, the first beta of AdamW; None: the optimiser's own."""
        for group in self._engine.optimizer.param_groups:
            group["lr"] = lr
            if momentum is not None and "betas" in group:
                group["betas"] = (momentum, group["betas"][1])
            elif momentum is not None:
                group["momentum"] = momentum
        self._engine.step()

    def updated(self) -> bool:
        """Was the gradient of the last `step` finite? If not, the update was left out or has spoilt the weights."""
        norm = self._engine.get_global_grad_norm()  # -1 where it is not finite
        return bool(self._engine.was_step_applied()) and (norm is None or 0 <= float(norm) < math.inf)

    def finite(self) -> bool:
        """Collective: are all weights finite? They are the same on every rank, and so is the answer."""
        sums = torch.stack([weight.double().sum() for _, weight in self.whole_weights()])
        return bool(sums.isfinite().all())

    def whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Collective: names and weights as the model has them, each whole while it is looked at."""
        for name, parameter in self.module.named_parameters():
            with deepspeed.zero.GatheredParameters([parameter]):
                yield name, parameter.detach()

    def share(self) -> Share:
        """What this rank keeps of weights and optimiser, to be saved and restored."""
        return Share(self.module, self._engine.optimizer, self._stage, self.world.rank)

    @contextmanager
    def restoring(self) -> Iterator[Share]:
        """Collective. The share, to be overwritten; the model has its float32 weights afterwards. DeepSpeed's own
        `load_checkpoint` unpickles, and is not used."""
        outer = self._engine.optimizer
        if self._stage == 3:
            outer.checkpoint_event_prologue()  # weights that are gathered are given back
        with torch.no_grad():
            yield self.share()
            if self._stage in (1, 2):
                outer.update_lp_params()
            elif self._stage == 3:
                for group in range(len(outer.fp16_groups)):
                    outer._reassign_or_swap_out_partitioned_parameters(group)
                outer.checkpoint_event_epilogue()

    def whole_state(self) -> dict[str, Tensor]:
        """Collective: the state dict on the CPU."""
        state = {key: value.detach().cpu() for key, value in self.module.state_dict().items()}
        return state | {name: weight.cpu() for name, weight in self.whole_weights()}
