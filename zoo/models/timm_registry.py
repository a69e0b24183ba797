"""The zoo's names in timm's registry, and what timm calls the `pretrained_cfg` of a model.

Normalisation is a layer of every model. Its configuration therefore says mean 0 and std 1, and a transform that timm
builds from it leaves images in [0,1].
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from timm.models import PretrainedCfg, build_model_with_cfg, register_model
from torch import nn

from zoo.models import catalog, limits
from zoo.models.catalog import Options
from zoo.models.convnet import sides
from zoo.weights import fetch, table

SOURCES = ("url", "file", "hf_hub_id", "state_dict")  # where timm's own loader reads weights
PHOTOGRAPH = 224  # images of at least this side are cropped out of larger ones; smaller models see whole images
default_cfgs: dict[str, dict[str, Any]] = {}  # read by timm's `register_model`


def describe(name: str, options: Options) -> dict[str, Any]:
    """Return timm's description of a model with these options: its input, and the names of its first and last layer."""
    chans, size = options["in_chans"], options["img_size"]
    cfg = PretrainedCfg(
        architecture=name,
        input_size=(chans, size, size),
        fixed_input_size=True,
        crop_pct=0.875 if size >= PHOTOGRAPH else 1.0,
        mean=(0.0,) * chans,
        std=(1.0,) * chans,
        num_classes=options["num_classes"],
        **PARTS[options["backbone"]](options),
        **_weights(name),
    )
    return dict(cfg.to_dict())


def _vit(options: Options) -> Options:
    if options["patch_cap"] is not None or options["patch_constraint"] is not None:
        return {"first_conv": (), "classifier": "head"}  # a constrained kernel has no weight of that name to adapt
    return {
        "first_conv": "patch_embed.proj" if options["stem"] is None else "patch_embed.convs.0",
        "classifier": "head",
    }


def _text(options: Options) -> Options:
    return {"first_conv": (), "classifier": "head"}


def _swin(options: Options) -> Options:
    side = options["img_size"] // options["patch_size"]
    for _ in options["depths"][1:]:
        side = -(-side // 2)
    return {"first_conv": "patch_embed.proj", "classifier": "head.fc", "pool_size": (side, side)}


def _convnet(options: Options) -> Options:
    *_, side = options["img_size"], *sides(options["layers"], options["img_size"])
    return {"first_conv": "convs.0", "classifier": "head", "pool_size": (side, side)}


PARTS: dict[str, Callable[[Options], Options]] = {"vit": _vit, "text": _text, "swin": _swin, "convnet": _convnet}
LEVELS: dict[str, Callable[[Options], int]] = {  # the number of intermediate features
    "vit": lambda options: int(options["depth"]),
    "text": lambda options: int(options["depth"]),
    "swin": lambda options: len(options["depths"]),
    "convnet": lambda options: len(options["layers"]),
}


def _weights(name: str) -> dict[str, str]:
    """Return the place of the published weights of a name, in timm's terms."""
    if (said := table.entries().get(name)) is None:
        return {}
    if said.source == table.PACKAGE:
        return {"file": str(table.HERE / name / table.WEIGHTS)}
    return {"url": fetch.within(said.source, table.WEIGHTS)}


def register(models: Mapping[str, Options], create: Callable[..., nn.Module]) -> None:
    """Make every name a timm entry point, so that `timm.create_model(name)` gives the model of `create(name)`."""
    for name, options in models.items():
        default_cfgs[name] = describe(name, options)
        register_model(_entry(name, options, create))


def _entry(name: str, defaults: Options, create: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    def entry(
        pretrained: bool = False,
        pretrained_cfg: Any = None,
        pretrained_cfg_overlay: Mapping[str, Any] | None = None,
        drop_rate: float = 0.0,  # which timm's train.py always passes
        **options: Any,
    ) -> nn.Module:
        if drop_rate:
            options["drop_rate"] = drop_rate  # refused, as any option that a model does not have
        told = _fields(pretrained_cfg) | dict(pretrained_cfg_overlay or {})
        published = default_cfgs[name]
        elsewhere = any(told.get(key) not in (None, published.get(key)) for key in SOURCES)
        options["img_size"] = _side(options.get("img_size", defaults["img_size"]))
        given = {key: value for key, value in options.items() if key in defaults and (key, value) != ("num_classes", 0)}
        limits.check(own := defaults | given)
        return build_model_with_cfg(
            partial(_build, create, name, pretrained and not elsewhere),
            name,
            pretrained and elsewhere,
            pretrained_cfg=pretrained_cfg or describe(name, own),
            pretrained_cfg_overlay=pretrained_cfg_overlay,
            feature_cfg={"feature_cls": "getter", "out_indices": min(3, LEVELS[own["backbone"]](own))},
            **options,
        )

    entry.__name__ = entry.__qualname__ = name
    return entry


def _build(
    create: Callable[..., nn.Module], name: str, pretrained: bool, num_classes: int, **options: Any
) -> nn.Module:
    """Create a model of the zoo, and then remove its head (0 classes) or change its pooling (none: '') as timm does."""
    zoos = options.get("global_pool") in ("avg", "cls") and "global_pool" in catalog.models()[name]
    pool = None if zoos else options.pop("global_pool", None)
    if num_classes:
        options["num_classes"] = num_classes
    model: Any = create(name, pretrained=pretrained, **options)
    if not num_classes:
        model.reset_classifier(0, pool)
    elif pool not in (None, getattr(model, "global_pool", None)):
        state = model.state_dict()
        model.reset_classifier(num_classes, pool)
        model.load_state_dict(state)  # the head stays
    return model


def _fields(cfg: Any) -> dict[str, Any]:
    """Return the entries of a configuration that timm passes: none, the tag of one, a mapping or a `PretrainedCfg`."""
    if isinstance(cfg, PretrainedCfg):
        return vars(cfg)
    return dict(cfg) if isinstance(cfg, Mapping) else {}


def _side(size: Any) -> Any:
    """Return the side of a square (height, width), as timm writes sizes; the zoo checks any other value."""
    return size[0] if isinstance(size, tuple | list) and len(size) == 2 and size[0] == size[1] else size
