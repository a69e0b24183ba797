"""Two-layer models of each kind on 8 x 8 images, for tests of whole certificates; the zoo's models, shrunk."""

import json
from functools import cache
from typing import Any

import torch
from torch import Tensor

import zoo
from zoo.models.overview import tiny_options
from zoo.rules import nodes_of, rules_of

SMALL: dict[str, Any] = {"img_size": 8, "in_chans": 1, "num_classes": 4}
THREE_HEADS: dict[str, Any] = SMALL | {"patch_size": 4, "embed_dim": 12, "depth": 2, "num_heads": 3}
TINY: dict[str, Any] = {"patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2, "mlp_ratio": 2.0}
AVG: dict[str, Any] = TINY | {"global_pool": "avg"}
PARTS: dict[str, dict[str, Any]] = {
    "smooth": AVG | {"norm": "smoothproject", "attn_norm": "smoothproject", "mlp": "sll_tanh", "block": "normfirst"},
    "lofast": AVG | {"norm": "layerproject", "attn_norm": "layerproject", "mlp": "sll_relu", "block": "normfirst"},
    "standard": AVG | {"norm": {"name": "layernorm", "eps": 1.0}, "mlp": "gelu", "block": "prenorm"},
    "cls": TINY | {"norm": {"name": "layernorm", "eps": 0.1}, "mlp": "gelu", "block": "prenorm", "global_pool": "cls"},
    "fc_norm": AVG | {"norm": {"name": "layernorm", "eps": 1.0}, "mlp": "gelu", "block": "prenorm", "fc_norm": True},
    "stem": AVG | {"norm": {"name": "layernorm", "eps": 1.0}, "mlp": "gelu", "block": "prenorm", "stem": (6,)},
}


def small_model(parts: str, seed: int) -> Any:
    """Return a seeded model in eval mode; the seed also selects one of three sizes of weights."""
    torch.manual_seed(seed)
    model = zoo.create_model("dp_vit_ti", **(SMALL | PARTS[parts]))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim > 1:
                p.copy_(torch.randn_like(p) * (0.3 + 0.7 * (seed % 3)) * p.shape[-1] ** -0.5)
            elif "bias" in name:
                p.copy_(0.1 * torch.randn_like(p))
    return model.eval()


def labelled(model: Any, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return random images and the model's own answers, which are correct by construction."""
    x = torch.rand(count, 1, 8, 8, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        return x, model(x).argmax(-1)


def nodes_up_to_first_block(model: Any) -> int:
    """Return the nodes of the chain up to and including the first block."""
    trunk = rules_of(model).trunk
    assert trunk is not None
    links, _ = trunk(model)
    return sum(len(nodes_of(link)) for link in links[: 1 + list(links).index(model.blocks[0])])


@cache
def distinct() -> dict[str, list[str]]:
    """Group the zoo's names whose shrunken models have the same options, and so the same code, under the first name."""
    models: dict[str, list[str]] = {}
    for name in zoo.list_models():
        options = zoo.model_options(name, **tiny_options(name))
        models.setdefault(json.dumps(options, sort_keys=True, default=str), []).append(name)
    return {names[0]: names for names in models.values()}
