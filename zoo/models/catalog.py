"""The models by name: every option of every model, and the source of its sizes. Data only; `factory.py` builds them.

A name is `<variant>_<backbone>_<size>` (`l2_deit_ti`), or one of the families at the end of this file. Patch sizes
other than 16 have names where CertViT uses them (`_p8`, `_p32`); otherwise they are an option.
"""

import itertools
from typing import Any

from zoo import attention as attention_files
from zoo.attention.softmax.module import SoftmaxAttention

Options = dict[str, Any]

# timm's defaults for a ViT: patch 16, 224 pixels, class token, LayerNorm, GELU, biases.
VIT: Options = {
    "backbone": "vit",
    "block": "prenorm",
    "norm": "layernorm",
    "attn_norm": None,
    "mlp": "gelu",
    "mlp_ratio": 4.0,
    "residual": None,
    "init": "trunc_normal",
    "bias": True,  # of every linear layer but W_Q, W_K, W_V
    "qkv_bias": True,
    "num_classes": 1000,
    "img_size": 224,
    "patch_size": 16,
    "in_chans": 3,
    "global_pool": "cls",
    "fc_norm": False,
    "drop_path_rate": 0.0,
    "stem": None,
    "patch_cap": None,
    "patch_constraint": None,
    "gpsa_layers": 0,
    "locality_strength": 1.0,
    "gating_init": 1.0,
    "mean": None,
    "std": None,
}
EPS_5 = {"name": "layernorm", "eps": 1e-5}  # torch's default; timm's ViTs have 1e-6
VIT_SIZES: dict[str, Options] = {
    "ti": {"embed_dim": 192, "depth": 12, "num_heads": 3},
    "s": {"embed_dim": 384, "depth": 12, "num_heads": 6},
    "b": {"embed_dim": 768, "depth": 12, "num_heads": 12},
    "l": {"embed_dim": 1024, "depth": 24, "num_heads": 16},
}
# ConViT (d'Ascoli et al. 2021): 10 blocks with gated positional attention, then the class token and 2 ordinary blocks.
# SpecFormer, F.2 counts the 10 and the 48 channels per head.
CONVIT: Options = VIT | {"depth": 12, "gpsa_layers": 10, "qkv_bias": False}
CONVIT_SIZES: dict[str, Options] = {
    "ti": {"embed_dim": 192, "num_heads": 4},
    "s": {"embed_dim": 432, "num_heads": 9},
    "b": {"embed_dim": 768, "num_heads": 16},
}
# Swin (Liu et al. 2021; CertViT, Table 6): width, blocks and heads of the four stages.
SWIN: Options = {
    "backbone": "swin",
    "norm": EPS_5,
    "mlp": "gelu",
    "mlp_ratio": 4.0,
    "init": "trunc_normal",
    "qkv_bias": True,
    "num_classes": 1000,
    "img_size": 224,
    "patch_size": 4,
    "in_chans": 3,
    "window_size": 7,
    "drop_path_rate": 0.0,
    "mean": None,
    "std": None,
}
SWIN_SIZES: dict[str, Options] = {
    "t": {"embed_dim": 96, "depths": (2, 2, 6, 2), "num_heads": (3, 6, 12, 24)},
    "s": {"embed_dim": 96, "depths": (2, 2, 18, 2), "num_heads": (3, 6, 12, 24)},
    "b": {"embed_dim": 128, "depths": (2, 2, 18, 2), "num_heads": (4, 8, 16, 32)},
    "l": {"embed_dim": 192, "depths": (2, 2, 18, 2), "num_heads": (6, 12, 24, 48)},
}
BACKBONES: dict[str, tuple[Options, dict[str, Options]]] = {
    "vit": (VIT, VIT_SIZES),
    # The ViT-S of SpecFormer (F.2) and Mo et al. 2022: 8 blocks, 8 heads, width 768.
    "vit_s": (
        VIT | {"norm": EPS_5},
        {"w768": {"embed_dim": 768, "depth": 8, "num_heads": 8, "mlp_ratio": 3.0, "qkv_bias": False}},
    ),
    # DeiT (Touvron et al. 2021): the architecture of ViT with another training recipe and other pretrained weights.
    "deit": (VIT, {size: VIT_SIZES[size] for size in ("ti", "s", "b")}),
    "convit": (CONVIT, CONVIT_SIZES),
    "swin": (SWIN, SWIN_SIZES),
}
PATCHES = ("dp", "l2")  # variants whose ViTs have names at patch 8 and 32: CertViT, Tables 2 and 3

# Prefixes that set more than, or something other than, the attention variant of their name.
PREFIXES: dict[str, Options] = {
    # SpecFormer is dot-product attention; its penalty belongs to the training (configs/names.yaml).
    "spec": {"attention": {"name": "dp"}},
    # LipsFormer (Qi et al. 2023): branches start with 1 / L, L = 12 blocks.
    "lips": {
        "attention": {"name": "scsa"},
        "norm": "centernorm",
        "block": "postnorm",
        "residual": {"name": "weighted", "init": 1 / 12},
        "init": "spectral",
        "drop_path_rate": 0.1,
    },
}
OWN_FAMILY = ("conv",)  # variants that have their own backbones below, and are not used in a ViT

LIPSCHITZ: Options = VIT | {"block": "normfirst", "global_pool": "avg", "patch_cap": 1.0, "mlp_ratio": 2.0}
# LoFAST: 3 layers, width 128, patch 16, LayerProject, SLL, caps. The paper has R = 1 before the attention; here it
# is R = 2 with smaller caps on W_Q and W_K (README, results).
LOFAST_C10: Options = LIPSCHITZ | {
    "attention": {"name": "dp", "q_cap": 0.3, "k_cap": 0.3, "v_cap": 0.35, "o_cap": 0.35},
    "norm": "layerproject",
    "attn_norm": {"name": "layerproject", "radius": 2.0},
    "mlp": "sll_relu",
    "num_classes": 10,
    "img_size": 32,
    "embed_dim": 128,
    "depth": 3,
    "num_heads": 4,
    "mean": (0.5, 0.5, 0.5),
    "std": (0.25, 0.25, 0.25),
}
SMOOTH: Options = {"norm": "smoothproject", "attn_norm": {"name": "smoothproject", "radius": 2.0}, "mlp": "sll_tanh"}
# Other 1-Lipschitz layers that replace SLL and the cap of the patch embedding.
AOL: Options = {"mlp": "aol_relu", "patch_cap": None, "patch_constraint": "aol"}
ORTHOGONAL: Options = {"mlp": "orthogonal_relu", "patch_cap": None, "patch_constraint": "orthogonal"}
# A pre-norm GELU ViT for which the adjoint certificate is strong after certified training. Nearly all mixing of tokens
# is by position (gates start at sigmoid(3) = 0.95), which is linear, as CenterNorm is: only the MLPs are nonlinear.
CERT_C10: Options = VIT | {
    "attention": {"name": "dp"},
    "gpsa_layers": 2,
    "gating_init": 3.0,
    "norm": "centernorm",
    "mlp_ratio": 2.0,
    "init": "orthogonal",
    "global_pool": "avg",
    "num_classes": 10,
    "img_size": 32,
    "patch_size": 8,
    "embed_dim": 126,
    "depth": 2,
    "num_heads": 9,
    "mean": (0.5, 0.5, 0.5),
    "std": (0.25, 0.25, 0.25),
}
# A model that attends by content; its certificates are weaker so far. It has one nonlinearity before the tokens, in
# wide overlapping patches, and one block. Two nonlinearities in a row there cost the certificate more than they give.
CERT_STEM_C10: Options = CERT_C10 | {
    "gpsa_layers": 0,
    "stem": ((256, 8, 4, 2),),
    "embed_dim": 128,
    "mlp_ratio": 3.0,
    "depth": 1,
    "num_heads": 4,
}
# The same with gated positions instead of content: the units of the stem no longer change the scores nonlinearly, which
# causes most of the remainders of the model above.
CERT_GPSA_C10: Options = CERT_STEM_C10 | {"gpsa_layers": 1, "embed_dim": 126, "num_heads": 9}
# The same for Imagenette at 64 pixels: twice the kernels and strides, so that features and tokens are as many.
CERT_IMAGENETTE: Options = CERT_GPSA_C10 | {"img_size": 64, "patch_size": 16, "stem": ((256, 16, 8, 4),)}
# The same for training on a GPU: three times the filters, twice the width, a second block.
CERT_GPSA_C10_GPU: Options = CERT_GPSA_C10 | {
    "stem": ((768, 8, 4, 2),),
    "gpsa_layers": 2,
    "embed_dim": 252,
    "depth": 2,
}
# Attentions by content in the place of the gated positions of CERT_GPSA_C10, as benchmarks/attentions.py compares them.
CERT_ATTENTIONS: dict[str, Options] = {
    "dp": {"name": "dp"},
    "l2": {"name": "l2"},
    "ln": {"name": "ln"},
    "msvp": {"name": "dp"},  # trained with SpecFormer's penalty
    "scsa": {"name": "scsa", "tau": 0.1062, "nu": 1.0, "eps": 9.724},
}
# Digits are farther apart than photographs: with pixels divided by 0.5, not by 0.25, the same caps allow radii twice as
# large.
CERT_MNIST: Options = CERT_C10 | {
    "gpsa_layers": 1,
    "depth": 1,
    "mlp_ratio": 3.0,
    "img_size": 28,
    "patch_size": 7,
    "in_chans": 1,
    "mean": (0.13,),
    "std": (0.5,),
}
# Two heads and small caps on W_Q and W_K: LoFAST adds up the change of P over heads, in proportion to both.
SPEC_DIGITS: Options = LIPSCHITZ | {
    "attention": {"name": "dp", "q_cap": 0.3, "k_cap": 0.3, "v_cap": 0.5, "o_cap": 0.5},
    "norm": "smoothproject",
    "attn_norm": {"name": "smoothproject", "radius": 2.0},
    "mlp": "sll_relu",
    "num_classes": 10,
    "img_size": 8,
    "patch_size": 4,
    "in_chans": 1,
    "embed_dim": 48,
    "depth": 2,
    "num_heads": 2,
}


# The family of LoFAST as published: R = 1 before the attention, caps on W_V and W_O a fraction of 1 (0.25 to 1
# there: `attention.v_cap`, `attention.o_cap`), 4 to 8 heads. Figure 2 has width 384, Table 1 width 128.
LOFAST: Options = LOFAST_C10 | {
    "attention": {"name": "dp", "q_cap": 1.0, "k_cap": 1.0, "v_cap": 0.5, "o_cap": 0.5},
    "attn_norm": {"name": "layerproject", "radius": 1.0},
}
LOFAST_SIZES = {128: (3, 4, 5), 384: (2, 4, 6, 8, 12)}  # width: layers

# LoFAST, appendix D: sentences of at most 32 tokens of width 64; their embeddings are the input
# (zoo/models/sentences.py). They are not divided by a std, so that a radius is one of raw embeddings; a centred one is
# at most 4 long.
OF_PATCHES = ("patch_size", "stem", "patch_cap", "patch_constraint", "gpsa_layers", "locality_strength", "gating_init")
LOFAST_TEXT: Options = {key: value for key, value in LOFAST.items() if key not in OF_PATCHES} | {
    "backbone": "text",
    "num_classes": 2,
    "img_size": 32,
    "in_chans": 2,
    "embed_dim": 64,
    "vocabulary": 16_384,
    "mean": (0.5,),
    "std": (1.0,),
}

# CoViT, on CIFAR-10 resized to 224: mean pooling, then the norm; no class token. (The released code averages over
# one as well.) CoViT replaces attention by 1-D convolutions over the tokens.
CAUCHY: Options = VIT | {
    "norm": EPS_5,
    "global_pool": "avg",
    "fc_norm": True,
    "num_classes": 10,
    "embed_dim": 512,
    "mean": (0.5, 0.5, 0.5),
    "std": (0.5, 0.5, 0.5),
}
TINY = {"embed_dim": 128, "patch_size": 32}
# name: depth, heads, other options. The paper gives the sizes in its appendix only; these are those of the released
# code, and they match the figures of Table 2.
CAUCHY_VITS: dict[str, tuple[int, int, Options]] = {
    "s1": (1, 1, {}),
    "s2": (1, 4, {}),
    "s3": (4, 1, {}),
    "s4": (4, 4, {}),
    "m1": (8, 1, {}),
    "m2": (8, 4, {}),
    "m3": (8, 4, {"patch_size": 32}),
    "l1": (12, 8, {"patch_size": 32}),
    "t1": (4, 1, TINY),
    "t2": (4, 4, TINY),
    "t3": (8, 1, TINY),
    "t4": (8, 4, TINY),
}
COVITS: dict[str, tuple[int, tuple[int, ...], Options]] = {
    "s1": (1, (3,), {}),
    "s2": (1, (3, 3, 3, 3), {}),
    "s3": (4, (3,), {}),
    "s4": (4, (3, 3, 3, 3), {}),
    "s5": (4, (7, 7, 7, 7), {}),
    "m1": (8, (3,), {}),
    "m2": (8, (1, 3, 5, 7), {}),
    "m3": (8, (3, 3, 3, 3), {}),
    "m4": (8, (7, 7, 7, 7), {}),
    "m5": (8, (3, 3, 3, 3), {"patch_size": 32}),
    "l1": (12, (3, 3, 3, 3, 5, 5, 5, 5), {"patch_size": 32}),
    "l2": (16, (3, 3, 3, 3, 5, 5, 5, 5), {"patch_size": 32}),
    "t1": (4, (3,), TINY),
    "t2": (4, (3, 3, 3, 3), TINY),
    "t3": (8, (3,), TINY),
    "t4": (8, (3, 3, 3, 3), TINY),
}

# CertViT's ViTs from scratch (docs/references.md#certvit): no biases at all. Depth and MLP ratio are chosen to match
# the parameter counts of its Table 1; its Table 4 and text contradict each other and the counts.
CERTVIT: Options = VIT | {"attention": {"name": "l2"}, "norm": EPS_5, "bias": False, "qkv_bias": False}
CERTVITS: dict[str, Options] = {
    "mnist": {"img_size": 28, "in_chans": 1, "patch_size": 7, "embed_dim": 128, "depth": 6, "num_heads": 8},
    "c10": {"img_size": 32, "patch_size": 4, "embed_dim": 192, "depth": 10, "num_heads": 3},
    "c100": {"img_size": 32, "patch_size": 4, "embed_dim": 192, "depth": 12, "num_heads": 3, "num_classes": 100},
    "tin": {
        "img_size": 64,
        "patch_size": 4,
        "embed_dim": 384,
        "depth": 12,
        "num_heads": 12,
        "mlp_ratio": 1.0,
        "num_classes": 200,
    },
}


# The conv nets of CertViT, Table 1 (layers: channels out, kernel size, stride, padding). Its parameter counts include
# the thresholds of ReLU_theta for all but MNIST, and its 8C2F has no padding in the strided convolutions.
CONVNET: Options = {
    "backbone": "convnet",
    "init": "orthogonal",
    "theta": 1.0,
    "num_classes": 10,
    "img_size": 32,
    "in_chans": 3,
    "mean": None,
    "std": None,
}
FOUR_C: Options = {"layers": ((32, 3, 1, 1), (32, 4, 2, 1), (64, 3, 1, 1), (64, 4, 2, 1)), "hidden": (512, 512)}
SIX_C: Options = {
    "layers": ((32, 3, 1, 1), (32, 3, 1, 1), (32, 4, 2, 1), (64, 3, 1, 1), (64, 3, 1, 1), (64, 4, 2, 1)),
    "hidden": (512,),
}
EIGHT_C: Options = {
    "layers": (
        (64, 3, 1, 1), (64, 3, 1, 1), (64, 4, 2, 0), (128, 3, 1, 1), (128, 3, 1, 1), (128, 4, 2, 0), (256, 3, 1, 1),
        (256, 4, 2, 0),
    ),
    "hidden": (256,),
}  # fmt: skip
CONVNETS: dict[str, Options] = {
    "conv_4c3f": FOUR_C,  # CIFAR-10
    "conv_4c3f_mnist": FOUR_C | {"theta": None, "img_size": 28, "in_chans": 1},
    "conv_6c2f": SIX_C | {"theta": 2.0},  # CIFAR-10
    "conv_8c2f": EIGHT_C | {"num_classes": 100},  # CIFAR-100
    "conv_8c2f_tin": EIGHT_C | {"num_classes": 200, "img_size": 64},  # TinyImageNet
}


def models() -> dict[str, Options]:
    """Return every name with its options."""
    return _composed() | _families()


def _families() -> dict[str, Options]:
    """Return the models that the papers use in addition to the standard backbones."""
    found = {
        "spec_vit_digits": SPEC_DIGITS,
        "cert_vit_c10": CERT_C10,
        "cert_stem_vit_c10": CERT_STEM_C10,
        "cert_gpsa_vit_c10": CERT_GPSA_C10,
        "cert_gpsa_vit_c10_gpu": CERT_GPSA_C10_GPU,
        "cert_gpsa_vit_imagenette": CERT_IMAGENETTE,
        "cert_gpsa_vit_tin": CERT_GPSA_C10 | {"num_classes": 200},
        "cert_vit_mnist": CERT_MNIST,
        "cert_vit_c100": CERT_GPSA_C10 | {"num_classes": 100},
        "lofast_vit_c10": LOFAST_C10,
        "lofast_vit_c10_smooth": LOFAST_C10 | SMOOTH,
        "lofast_vit_c10_aol": LOFAST_C10 | AOL,
        "lofast_vit_c10_orthogonal": LOFAST_C10 | ORTHOGONAL,
    }
    for name, attention in CERT_ATTENTIONS.items():
        found[f"cert_{name}_vit_c10"] = CERT_GPSA_C10 | {"gpsa_layers": 0, "attention": attention}
    for width, depths in LOFAST_SIZES.items():
        size = {"embed_dim": width, "num_heads": 8 if width == 384 else 4}
        found |= {f"lofast_vit_w{width}_l{depth}": LOFAST | size | {"depth": depth} for depth in depths}
    for depth, heads in itertools.product((3, 6), (4, 8)):
        found[f"lofast_text_l{depth}_h{heads}"] = LOFAST_TEXT | {"depth": depth, "num_heads": heads}
    for size_name, (depth, heads, own) in CAUCHY_VITS.items():
        found[f"dp_vit_{size_name}"] = CAUCHY | {"attention": {"name": "dp"}, "depth": depth, "num_heads": heads} | own
    for size_name, (depth, kernels, own) in COVITS.items():
        mixing = {"attention": {"name": "conv", "kernels": kernels}, "depth": depth, "num_heads": len(kernels)}
        found[f"covit_{size_name}"] = CAUCHY | mixing | own
    for dataset, own in CERTVITS.items():
        found[f"l2_certvit_{dataset}"] = CERTVIT | {"num_classes": 10} | own
    return found | {name: CONVNET | own for name, own in CONVNETS.items()}


def _composed() -> dict[str, Options]:
    """Return <variant>_<backbone>_<size>.

    Only attention of the form softmax(score) V is used in the other backbones, and a prefix only in those that have its
    options.
    """
    found: dict[str, Options] = {}
    for prefix, parts in _prefixes().items():
        kind = attention_files.variants()[parts["attention"]["name"]]
        everywhere = isinstance(kind, type) and issubclass(kind, SoftmaxAttention)
        for backbone in BACKBONES if everywhere else ("vit",):
            common, sizes = BACKBONES[backbone]
            if set(parts) - {"attention"} <= set(common):
                found |= {f"{prefix}_{backbone}_{size}": common | own | parts for size, own in sizes.items()}
        if prefix in PATCHES:
            found |= {
                f"{prefix}_vit_{size}_p{patch}": VIT | own | parts | {"patch_size": patch}
                for size, own in VIT_SIZES.items()
                for patch in (8, 32)
            }
    return found


def _prefixes() -> dict[str, Options]:
    plain = {name: {"attention": {"name": name}} for name in attention_files.variants() if name not in OWN_FAMILY}
    return plain | PREFIXES
