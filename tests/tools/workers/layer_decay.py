"""Worker of tests/trainers/engine/test_optimizers.py: at each ZeRO stage, a step with layer-wise decay is plain."""
# ruff: noqa: E402

import copy
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[3])

import torch
import torch.nn.functional as F

import zoo
from trainers.engine import engine
from trainers.engine.optimizers import make_optimizer
from trainers.settings import DeepSpeedConfig, OptimizerConfig, TrainConfig
from zoo.models.overview import tiny_options

LR, SIZE, NAME = 0.1, 8, "spec_vit_ti"
SETTINGS = OptimizerConfig("sgd", LR, momentum=0.0, layer_decay=0.5)


def main() -> None:
    world = engine.start(5)
    torch.manual_seed(0)
    options = tiny_options(NAME) | {"depth": 2, "img_size": 32, "in_chans": 3, "num_classes": 10}
    first = zoo.create_model(NAME, **options)
    images_BCHW, labels_B = torch.rand(SIZE, 3, 32, 32), torch.arange(SIZE)
    plain = copy.deepcopy(first).train()
    optimizer = make_optimizer(plain, SETTINGS)
    for group in optimizer.param_groups:
        group["lr"] = LR * group["lr_scale"]
    F.cross_entropy(plain(images_BCHW), labels_B).backward()
    optimizer.step()
    own = slice(world.rank, None, world.size)
    for stage in range(4):
        settings = DeepSpeedConfig(stage=stage, persistent_below=0)
        train = TrainConfig(epochs=1, batch_size=SIZE, clip_grad=0.0)
        built = engine.Engine(copy.deepcopy(first), [], train, SETTINGS, settings, world)
        built.train()
        built.backward(built.through(lambda model: F.cross_entropy(model(images_BCHW[own]), labels_B[own])))
        built.step(LR, None)
        weights = built.whole_state()
        for name, weight in plain.named_parameters():
            torch.testing.assert_close(weights[name], weight.detach(), rtol=0, atol=1e-6)
    engine.stop()


if __name__ == "__main__":
    main()
