"""How Meta's Llama code cuts tensors for model parallelism, by their names.

Names and cuts of Meta's ``llama`` (1 to 3), ``llama-models`` (3.2 with vision) and Llama 4, where
several tensors are one: ``wqkv`` and ``mlp.fc1_weight`` hold each rank's parts of the fused ones,
``moe_w_out_eF_D`` each rank's rows of every expert. The files do not say any of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckptool.core.placing import Rule
from ckptool.core.tp_rules import how_to_say
from ckptool.errors import CannotDo
from ckptool.formats._frameworks import size_in

_BY_ROWS = re.compile(
    r"(.*\.)?(((attention|attn)\.w[qkv]|feed_forward\.(w[13]|w_in_shared_FD|w_swiglu_FD)|output"
    r"|mlp\.c_fc|conv1\._linear|vision_projection)\.(weight|bias)|learnable_embedding\.weight)"
)
_BY_COLUMNS = re.compile(
    r"(.*\.)?(((attention|attn)\.wo|feed_forward\.(w2|w_out_shared_DF)|mlp\.c_proj)\.weight"
    r"|feed_forward\.mlp\.fc2_weight|experts\.moe_w_(in|swiglu)_eD_F)"
)
_COPIED = re.compile(
    r"(.*\.)?((\w+_)?norm[._]weight|ln_\w+\.(weight|bias)|rope\.freqs|\w*gate_(attn|ffn|ffwd)"
    r"|((attention|attn)\.wo|feed_forward\.w2|mlp\.c_proj)\.bias|\w*positional_embedding\w*"
    r"|class_embedding|\w+_tile_pos_embed\.(embedding|gate)"
    r"|feed_forward\.(router_DE|expert_activation_DE|global_gate_stats_3E))"
)
_KEY_VALUE = re.compile(r"(.*\.)?attention\.w[kv]\.(weight|bias)")
_FUSED_HEADS = re.compile(r"(.*\.)?attention\.wqkv\.(weight|bias)")
_FUSED_GATE = re.compile(r"(.*\.)?feed_forward\.mlp\.fc1_weight")
_EXPERTS_OUT = re.compile(r"(.*\.)?experts\.moe_w_out_eF_D")
_EMBEDDING = re.compile(r"(.*\.)?tok_embeddings\.weight")

RULES = tuple(
    Rule(glob, style=style, required=False)
    for style, globs in {
        "colwise": ("*attention.w[qkv].*", "*feed_forward.w[13].*", "*output.*"),
        "rowwise": ("*attention.wo.*", "*feed_forward.w2.*"),
        "replicate": ("*norm.weight", "*rope.freqs"),
    }.items()
    for glob in globs
)
"""How Meta's layers are cut, for the placement of tensors that are written in this format.

Token embeddings are placed as in the source, or by rows as in Llama 3.
"""


@dataclass(frozen=True, slots=True)
class Cut:
    """Each rank holds a part along ``dim`` of each of several blocks; None: it holds all.

    ``blocks`` are their sizes along ``dim``, as shares of a rank's part. ``holders`` consecutive
    ranks hold the same part.
    """

    dim: int | None
    blocks: tuple[int, ...] = (1,)
    holders: int = 1


@dataclass(frozen=True, slots=True)
class Sizes:
    """What ``params.json`` says of a model; None where it is silent."""

    width: int | None = None
    heads: int | None = None
    key_value_heads: int | None = None
    head_size: int | None = None
    layers: int | None = None
    experts: int | None = None

    @property
    def arguments(self) -> str:
        """Those that tell models apart, as a person reads them."""
        told = {
            "dim": self.width,
            "layers": self.layers,
            "heads": self.heads,
            "kv heads": self.key_value_heads,
            "experts": self.experts,
        }
        return ", ".join(f"{word} {size}" for word, size in told.items() if size is not None)


def sizes_of(params: Mapping[str, Any]) -> Sizes:
    """The sizes in the content of ``params.json``; Llama 4 has them under ``model``."""
    inner = params.get("model")
    params = inner if isinstance(inner, dict) else params
    experts = params.get("moe_args")
    width, heads = size_in(params, "dim"), size_in(params, "n_heads")
    return Sizes(
        width,
        heads,
        size_in(params, "n_kv_heads") or heads,
        size_in(params, "head_dim") or (width // heads if width and heads else None),
        size_in(params, "n_layers"),
        size_in(experts, "num_experts") if isinstance(experts, dict) else None,
    )


def cut_of(name: str, shape: tuple[int, ...], sizes: Sizes, ranks: int) -> Cut:
    """How a tensor is cut among ``ranks``; ``shape`` is that of one rank's part.

    Raises CannotDo where no rule is known, or params.json does not say what it takes.
    """
    if _EMBEDDING.fullmatch(name) and sizes.width is not None and len(shape) == 2:
        return Cut(0 if shape[1] == sizes.width else 1)
    if _FUSED_HEADS.fullmatch(name):
        return _heads(name, sizes, ranks)
    if _FUSED_GATE.fullmatch(name):
        return Cut(0, (1, 1))
    if _EXPERTS_OUT.fullmatch(name):
        if sizes.experts is None:
            raise CannotDo(f"{name}: params.json does not say how many experts it holds")
        return Cut(0, (1,) * sizes.experts)
    if _KEY_VALUE.fullmatch(name) and shape:
        return Cut(0, holders=_holders(shape[0], sizes, ranks))
    if _BY_ROWS.fullmatch(name):
        return Cut(0)
    if _BY_COLUMNS.fullmatch(name):
        return Cut(1)
    if _COPIED.fullmatch(name):
        return Cut(None)
    raise CannotDo(
        f"{name}: no rule says how Meta's code cuts it for model parallelism; {how_to_say(name)}"
    )


def is_embedding(name: str) -> bool:
    """Whether it is cut along either dim, by the generation of the model."""
    return _EMBEDDING.fullmatch(name) is not None


def _holders(rows: int, sizes: Sizes, ranks: int) -> int:
    """How many consecutive ranks hold the same part: several where key-value heads are few."""
    if not sizes.key_value_heads or not sizes.head_size:
        return 1
    return max(1, rows * ranks // (sizes.key_value_heads * sizes.head_size))


def _heads(name: str, sizes: Sizes, ranks: int) -> Cut:
    """Query, key and value heads, one after the other in each rank's part."""
    queries, keys = sizes.heads, sizes.key_value_heads
    if not queries or not keys:
        raise CannotDo(f"{name}: params.json does not say how many heads of each kind it holds")
    if queries % ranks or keys % ranks:
        raise CannotDo(f"{name}: {ranks} ranks share {queries} heads and {keys} key-value heads")
    return Cut(0, (queries // ranks, keys // ranks, keys // ranks))
