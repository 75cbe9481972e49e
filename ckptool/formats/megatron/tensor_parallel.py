"""How Megatron's own modules partition their parameters among tensor-parallel ranks.

From the sources of megatron-core 0.5 to 0.20 (``tensor_parallel/layers.py``, ``transformer/``,
``models/``, ``extensions/transformer_engine.py``) and of Megatron-LM's older ``language_model``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ckptool.core.sharding.tensor_parallel import REPLICATED, TpRule
from ckptool.formats.megatron.arguments import Arguments

_COLUMN = re.compile(
    r"(.*\.)?(word_embeddings|word_embeddings_for_head|output_layer|linear_qkv|linear_q|linear_kv"
    r"|linear_q_proj|linear_q_up_proj|linear_kv_up_proj|eh_proj|vision_model\.embedder"
    r"|query_key_value|query|key_value|language_model\.output_layer)\.(weight|bias)"
    r"|lm_head\.bias|(.*\.)?core_attention\.softmax_offset"
)
_GATED = re.compile(r"(.*\.)?(linear_fc1|dense_h_to_4h)\.(weight|bias)[0-9]*")
_ROW = re.compile(
    r"(.*\.)?(linear_proj|linear_fc2|dense_4h_to_h|(self_attention|inter_attention)\.dense)"
    r"\.(weight|bias)[0-9]*"
)
_REPLICATED = re.compile(
    r"(.*\.)?(\w*layer_?norm(_\w+)?|ln_\w+|\w*_norm|norm|enorm|hnorm|router|shared_experts)"
    r"(\.(weight|bias|expert_bias|gate_weight|local_tokens_per_expert|global_tokens_per_expert))?"
    r"|(.*\.)?(linear_qkv|linear_q_up_proj|linear_kv_up_proj|linear_fc1|linear_q_proj)"
    r"\.layer_norm_(weight|bias)"
    r"|(.*\.)?(position_embeddings|tokentype_embeddings|pooler\.dense|lm_head\.dense|binary_head)"
    r"(\.(weight|bias))?|(.*\.)?vision_model\.(class_token|mask_token|conv1\.(weight|bias))"
)
_DOWN = re.compile(r"(.*\.)?linear_(q|kv)_down_proj\.(weight|bias)")
_GROUPED = re.compile(r"((?:.*\.)?experts\.weight)([12])")
_MIXER = re.compile(
    r"(?P<head>(?:.*\.)?(?P<module>mixer|self_attention)\.)"
    r"(?P<leaf>in_proj\.weight|conv1d\.(?:weight|bias)|out_proj\.weight|norm\.weight"
    r"|A_log|D|dt_bias)"
)

Shapes = Mapping[str, tuple[int, ...]]
"""The shape that a rank's parameters have, by their names in the whole model."""


def rule_of(name: str, shapes: Shapes, stated: TpRule | None, args: Arguments) -> TpRule | str:
    """The rule of a parameter, or in words why it cannot be known.

    ``shapes`` are those of all parameters as ranks hold them; ``stated`` is what the parameter's
    own attributes say (``partition_dim``), where it was saved with them.
    """
    local = shapes[name]
    if _GATED.fullmatch(name):
        return _gated(name, shapes, stated, args)
    grouped = _GROUPED.fullmatch(name)
    if grouped:
        return _grouped(grouped, shapes, args)
    mixer = _MIXER.fullmatch(name)
    if mixer:
        return _mixed(mixer, shapes)
    if stated is not None:
        return stated
    if _COLUMN.fullmatch(name):
        return TpRule(0)
    if _ROW.fullmatch(name):
        return TpRule(1) if len(local) > 1 else REPLICATED
    down = _DOWN.fullmatch(name)
    if down:
        return _down_projection(down[2], local[0], args)
    if _REPLICATED.fullmatch(name):
        return REPLICATED
    return "no parameter of Megatron's own modules has this name"


_UNKNOWN_GATE = "nothing in the arguments says whether it holds a gate and an up projection"


def _gated(name: str, shapes: Shapes, stated: TpRule | None, args: Arguments) -> TpRule | str:
    """A gate and an up projection, or one alone: the layer after it takes as much as one of them.

    A vision model beside the language model that the arguments speak of may differ from it.
    ``partition_stride`` was 1 for a gated ``linear_fc1``, too, up to megatron-core 0.15.
    """
    after = name.replace("linear_fc1", "linear_fc2").replace("dense_h_to_4h", "dense_4h_to_h")
    head, _, leaf = after.rpartition(".")
    down = shapes.get(f"{head}.{leaf.replace('bias', 'weight')}", ())
    blocks = _halves(shapes[name][0], down[1] if len(down) == 2 else None, args)
    if blocks is not None:
        return TpRule(0, blocks)
    return stated if stated is not None and len(stated.blocks) > 1 else _UNKNOWN_GATE


def _halves(held: int, taken: int | None, args: Arguments) -> tuple[int, ...] | None:
    """The blocks of a projection to ``held``, of which the next one takes ``taken``."""
    gated = held == 2 * taken if taken and held in (taken, 2 * taken) else args.gated
    return None if gated is None else (1, 1) if gated else (1,)


def _grouped(found: re.Match[str], shapes: Shapes, args: Arguments) -> TpRule | str:
    """``GroupedMLP`` keeps all local experts in one tensor, read as [experts, in, out]."""
    if found[2] == "2":
        return TpRule(1)
    local, down = shapes[found[0]], shapes.get(f"{found[1]}2", ())
    blocks = _halves(local[-1], down[1] if len(down) == 3 else None, args)
    return _UNKNOWN_GATE if blocks is None else TpRule(2, blocks)


def _mixed(found: re.Match[str], shapes: Shapes) -> TpRule | str:
    """A state-space layer, ``MambaMixer``, or linear attention, ``GatedDeltaNet``.

    What ``in_proj`` and ``conv1d`` make is several tensors in one, of which each rank has a part:
    z, x, B, C and dt of Mamba (the convolution's are x, B and C); query, key, value, z, beta and
    alpha of the other (query, key and value).
    """
    leaf = found["leaf"]
    if not leaf.startswith(("in_proj", "conv1d")):
        return TpRule(1 if leaf == "out_proj.weight" else 0)
    out, heads, conv = (
        shapes.get(found["head"] + other, ())
        for other in ("out_proj.weight", "A_log", "conv1d.weight")
    )
    if len(out) != 2 or len(heads) != 1 or len(conv) != 3 or (conv[0] - out[1]) % 2:
        return "the layer's out_proj, A_log and conv1d do not tell what it is made of"
    inner, count, state = out[1], heads[0], (conv[0] - out[1]) // 2
    mamba = found["module"] == "mixer"
    convolved = (inner, state, state) if mamba else (state, state, inner)
    projected = (inner, *convolved, count) if mamba else (*convolved, inner, count, count)
    blocks: tuple[int, ...] = projected if leaf.startswith("in_proj") else convolved
    if sum(blocks) != shapes[found[0]][0]:
        return f"it has {shapes[found[0]][0]} rows, its layer's others tell of {sum(blocks)}"
    return TpRule(0, blocks)


def _down_projection(which: str, rows: int, args: Arguments) -> TpRule | str:
    """Latent attention's down projections are duplicated, or column-parallel in older layers."""
    latent = args.integer("q_lora_rank" if which == "q" else "kv_lora_rank")
    shared = 0 if which == "q" else args.integer("qk_pos_emb_head_dim")
    if latent is None or shared is None:
        return "the arguments state no latent sizes to tell whether it is replicated"
    if rows == latent + shared:
        return REPLICATED
    if rows * args.degree("TP") == latent + shared:
        return TpRule(0)
    return f"it has {rows} rows, the arguments say {latent + shared}"


def experts_view(name: str, local: tuple[int, ...], experts: int) -> tuple[int, ...]:
    """The shape under which a rank's parameter is read: ``GroupedMLP``'s by expert."""
    grouped = _GROUPED.fullmatch(name)
    if grouped is None or len(local) != 2:
        return local
    first = local[0] if grouped[2] == "1" else local[0] // experts
    return (experts, first, local[0] * local[1] // (experts * first))
