"""How Megatron's own modules partition their parameters among tensor-parallel ranks.

From the sources of megatron-core 0.5 to 0.20 (``tensor_parallel/layers.py``, ``transformer/``,
``models/``, ``extensions/transformer_engine.py``) and of Megatron-LM's older ``language_model``.
"""

from __future__ import annotations

import re

from ckptool.core.tp_rules import REPLICATED, TpRule
from ckptool.formats._megatron_args import Arguments

_COLUMN = re.compile(
    r"(.*\.)?(word_embeddings|word_embeddings_for_head|output_layer|linear_qkv|linear_q|linear_kv"
    r"|linear_q_proj|linear_q_up_proj|linear_kv_up_proj|eh_proj|query_key_value|query|key_value"
    r"|language_model\.output_layer)\.(weight|bias)|lm_head\.bias|(.*\.)?core_attention\.softmax_offset"
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
    r"(\.(weight|bias))?"
)
_DOWN = re.compile(r"(.*\.)?linear_(q|kv)_down_proj\.(weight|bias)")
_GROUPED = re.compile(r"(.*\.)?experts\.weight([12])")


def rule_of(
    name: str, local: tuple[int, ...], stated: TpRule | None, args: Arguments
) -> TpRule | str:
    """The rule of a parameter, or in words why it cannot be known.

    ``stated`` is what the parameter's own attributes say (``partition_dim``), where it was saved
    with them.
    """
    if _GATED.fullmatch(name):
        return _gated(stated, args)
    grouped = _GROUPED.fullmatch(name)
    if grouped:
        return _grouped(grouped[2], args)
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


def _gated(stated: TpRule | None, args: Arguments) -> TpRule | str:
    """``partition_stride`` was 1 for a gated ``linear_fc1``, too, up to megatron-core 0.15."""
    if args.gated is not None:
        return TpRule(0, 2 if args.gated else 1)
    return stated if stated is not None and stated.blocks > 1 else _UNKNOWN_GATE


def _grouped(which: str, args: Arguments) -> TpRule | str:
    """``GroupedMLP`` keeps all local experts in one tensor, read as [experts, in, out]."""
    if which == "2":
        return TpRule(1)
    if args.gated is None:
        return _UNKNOWN_GATE
    return TpRule(2, 2 if args.gated else 1)


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
