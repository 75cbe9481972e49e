"""How Megatron's own modules partition their parameters among tensor-parallel ranks.

From the sources of megatron-core 0.5 to 0.20 (``tensor_parallel/layers.py``, ``transformer/``,
``models/``, ``extensions/transformer_engine.py``) and of Megatron-LM's older ``language_model``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ckptool.core.sharding.tensor_parallel import COLUMN, REPLICATED, ROW, RuleTable, TpRule
from ckptool.errors import Undetermined
from ckptool.formats.megatron.arguments import Arguments

_GROUPED = re.compile(r"((?:.*\.)?experts\.weight)([12])")

Shapes = Mapping[str, tuple[int, ...]]
"""The shape that a rank's parameters have, by their names in the whole model."""


@dataclass(frozen=True, slots=True)
class _Facts:
    """What decides a rule besides a name, see ``find_rule``."""

    shapes: Shapes
    stated: TpRule | None
    args: Arguments


def _stated_rule(_: re.Match[str], facts: _Facts) -> TpRule | None:
    return facts.stated


def _row_rule(match: re.Match[str], facts: _Facts) -> TpRule:
    return ROW if len(facts.shapes[match[0]]) > 1 else REPLICATED


_UNKNOWN_GATE = "nothing in the arguments says whether it holds a gate and an up projection"


def _gated_rule(match: re.Match[str], facts: _Facts) -> TpRule:
    """A gate and an up projection, or one alone: the layer after it takes as much as one of them.

    A vision model beside the language model that the arguments speak of may differ from it.
    ``partition_stride`` was 1 for a gated ``linear_fc1``, too, up to megatron-core 0.15.
    """
    name, shapes, stated = match[0], facts.shapes, facts.stated
    after = name.replace("linear_fc1", "linear_fc2").replace("dense_h_to_4h", "dense_4h_to_h")
    head, _, leaf = after.rpartition(".")
    down = shapes.get(f"{head}.{leaf.replace('bias', 'weight')}", ())
    blocks = _halves(shapes[name][0], down[1] if len(down) == 2 else None, facts.args)
    if blocks is not None:
        return TpRule(0, blocks)
    if stated is None or len(stated.blocks) == 1:
        raise Undetermined(_UNKNOWN_GATE)
    return stated


def _halves(held: int, taken: int | None, args: Arguments) -> tuple[int, ...] | None:
    """Return the blocks of a projection to ``held``, of which the next one takes ``taken``."""
    gated = held == 2 * taken if taken and held in (taken, 2 * taken) else args.gated
    return None if gated is None else (1, 1) if gated else (1,)


def _grouped_rule(match: re.Match[str], facts: _Facts) -> TpRule:
    """``GroupedMLP`` keeps all local experts in one tensor, read as [experts, in, out]."""
    if match[2] == "2":
        return ROW
    local, down = facts.shapes[match[0]], facts.shapes.get(f"{match[1]}2", ())
    blocks = _halves(local[-1], down[1] if len(down) == 3 else None, facts.args)
    if blocks is None:
        raise Undetermined(_UNKNOWN_GATE)
    return TpRule(2, blocks)


def _mixer_rule(match: re.Match[str], facts: _Facts) -> TpRule:
    """Return a state-space layer, ``MambaMixer``, or linear attention, ``GatedDeltaNet``.

    What ``in_proj`` and ``conv1d`` make is several tensors in one, of which each rank has a part:
    z, x, B, C and dt of Mamba (the convolution's are x, B and C); query, key, value, z, beta and
    alpha of the other (query, key and value).
    """
    leaf, shapes = match["leaf"], facts.shapes
    if not leaf.startswith(("in_proj", "conv1d")):
        return TpRule(1 if leaf == "out_proj.weight" else 0)
    out, heads, conv = (
        shapes.get(match["head"] + other, ())
        for other in ("out_proj.weight", "A_log", "conv1d.weight")
    )
    if len(out) != 2 or len(heads) != 1 or len(conv) != 3 or (conv[0] - out[1]) % 2:
        raise Undetermined("the layer's out_proj, A_log and conv1d do not tell its parts")
    inner, count, state = out[1], heads[0], (conv[0] - out[1]) // 2
    mamba = match["module"] == "mixer"
    convolved = (inner, state, state) if mamba else (state, state, inner)
    projected = (inner, *convolved, count) if mamba else (*convolved, inner, count, count)
    blocks: tuple[int, ...] = projected if leaf.startswith("in_proj") else convolved
    if sum(blocks) != shapes[match[0]][0]:
        rows = shapes[match[0]][0]
        raise Undetermined(f"it has {rows} rows, but its layer's other tensors give {sum(blocks)}")
    return TpRule(0, blocks)


def _down_rule(match: re.Match[str], facts: _Facts) -> TpRule:
    """Latent attention's down projections are duplicated, or column-parallel in older layers."""
    which, rows, args = match[2], facts.shapes[match[0]][0], facts.args
    latent = args.integer("q_lora_rank" if which == "q" else "kv_lora_rank")
    shared = 0 if which == "q" else args.integer("qk_pos_emb_head_dim")
    if latent is None or shared is None:
        raise Undetermined("the arguments state no latent sizes to tell whether it is replicated")
    if rows == latent + shared:
        return REPLICATED
    if rows * args.degree("TP") == latent + shared:
        return COLUMN
    raise Undetermined(f"it has {rows} rows, the arguments say {latent + shared}")


_TABLE: RuleTable[_Facts] = RuleTable(
    "Megatron",
    (
        (re.compile(r"(.*\.)?(linear_fc1|dense_h_to_4h)\.(weight|bias)[0-9]*"), _gated_rule),
        (_GROUPED, _grouped_rule),
        (
            re.compile(
                r"(?P<head>(?:.*\.)?(?P<module>mixer|self_attention)\.)"
                r"(?P<leaf>in_proj\.weight|conv1d\.(?:weight|bias)|out_proj\.weight|norm\.weight"
                r"|A_log|D|dt_bias)"
            ),
            _mixer_rule,
        ),
        (re.compile(".*"), _stated_rule),
        (
            re.compile(
                r"(.*\.)?(word_embeddings|word_embeddings_for_head|output_layer|linear_qkv|linear_q|linear_kv"
                r"|linear_q_proj|linear_q_up_proj|linear_kv_up_proj|eh_proj|vision_model\.embedder"
                r"|query_key_value|query|key_value|language_model\.output_layer)\.(weight|bias)"
                r"|lm_head\.bias|(.*\.)?core_attention\.softmax_offset"
            ),
            COLUMN,
        ),
        (
            re.compile(
                r"(.*\.)?(linear_proj|linear_fc2|dense_4h_to_h|(self_attention|inter_attention)\.dense)"
                r"\.(weight|bias)[0-9]*"
            ),
            _row_rule,
        ),
        (re.compile(r"(.*\.)?linear_(q|kv)_down_proj\.(weight|bias)"), _down_rule),
        (
            re.compile(
                r"(.*\.)?(\w*layer_?norm(_\w+)?|ln_\w+|\w*_norm|norm|enorm|hnorm|router|shared_experts)"
                r"(\.(weight|bias|expert_bias|gate_weight|local_tokens_per_expert|global_tokens_per_expert))?"
                r"|(.*\.)?(linear_qkv|linear_q_up_proj|linear_kv_up_proj|linear_fc1|linear_q_proj)"
                r"\.layer_norm_(weight|bias)"
                r"|(.*\.)?(position_embeddings|tokentype_embeddings|pooler\.dense|lm_head\.dense|binary_head)"
                r"(\.(weight|bias))?|(.*\.)?vision_model\.(class_token|mask_token|conv1\.(weight|bias))"
            ),
            REPLICATED,
        ),
    ),
)


def find_rule(name: str, shapes: Shapes, stated: TpRule | None, args: Arguments) -> TpRule:
    """Return the rule of a parameter; Undetermined where nothing tells it.

    ``shapes`` are those of all parameters as ranks hold them; ``stated`` is what the parameter's
    own attributes say (``partition_dim``), where it was saved with them.
    """
    return _TABLE.find(name, _Facts(shapes, stated, args))


def experts_view(name: str, local: tuple[int, ...], experts: int) -> tuple[int, ...]:
    """Return the shape under which a rank's parameter is read: ``GroupedMLP``'s by expert."""
    grouped = _GROUPED.fullmatch(name)
    if grouped is None or len(local) != 2:
        return local
    first = local[0] if grouped[2] == "1" else local[0] // experts
    return (experts, first, local[0] * local[1] // (experts * first))
