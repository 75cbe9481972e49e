"""Megatron's parameters: how its modules cut them among ranks, and their merge into whole tensors.

The rules are from the sources of megatron-core 0.5 to 0.20 (``tensor_parallel/layers.py``,
``transformer/``, ``models/``, ``extensions/transformer_engine.py``) and of Megatron-LM's older
``language_model``.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from msgspec import Struct, field

from ckptool.core.box import Box
from ckptool.core.catalog import TensorEntry
from ckptool.core.dtype import DType
from ckptool.core.sharding.tensor_parallel import (
    COLUMN,
    REPLICATED,
    ROW,
    Fit,
    GivenRules,
    RankCut,
    RuleTable,
    TpRule,
    fit_rank,
    merge_shards,
    report_unmerged,
)
from ckptool.core.views import reshape
from ckptool.errors import Damaged, Problem, Undetermined
from ckptool.formats.megatron.model import Arguments, is_expert

Rank = tuple[int, int, int]
"""Tensor-, pipeline- and expert-parallel rank."""
_GROUPED = re.compile(r"((?:.*\.)?experts\.weight)([12])")


def _cut_rows(match: re.Match[str], facts: ParameterRules) -> TpRule:
    return ROW if len(facts.shapes[match[0]]) > 1 else REPLICATED


_UNKNOWN_GATE = "the arguments do not say whether it holds a gate and an up projection"


def _cut_gated(match: re.Match[str], facts: ParameterRules) -> TpRule:
    """Distinguish a gated projection from a plain one: the layer after it takes one half or all.

    A vision model beside the language model that the arguments describe may differ from it.
    ``partition_stride`` was 1 for a gated ``linear_fc1``, too, up to megatron-core 0.15.
    """
    name, shapes, rule = match[0], facts.shapes, facts.stated.get(match[0])
    partner = name.replace("linear_fc1", "linear_fc2").replace("dense_h_to_4h", "dense_4h_to_h")
    head, _, leaf = partner.rpartition(".")
    down = shapes.get(f"{head}.{leaf.replace('bias', 'weight')}", ())
    blocks = _find_halves(shapes[name][0], down[1] if len(down) == 2 else None, facts.args)
    if blocks is not None:
        return TpRule(0, blocks)
    if rule is None or len(rule.blocks) == 1:
        raise Undetermined(_UNKNOWN_GATE)
    return rule


def _find_halves(size: int, after: int | None, args: Arguments) -> tuple[int, ...] | None:
    """Return the blocks of a projection to ``size``, of which the next one takes ``after``."""
    gated = size == 2 * after if after and size in (after, 2 * after) else args.gated
    return None if gated is None else (1, 1) if gated else (1,)


def _cut_grouped(match: re.Match[str], facts: ParameterRules) -> TpRule:
    """Cut ``GroupedMLP``, which keeps all local experts in one tensor: [experts, in, out]."""
    if match[2] == "2":
        return ROW
    local, down = facts.shapes[match[0]], facts.shapes.get(f"{match[1]}2", ())
    blocks = _find_halves(local[-1], down[1] if len(down) == 3 else None, facts.args)
    if blocks is None:
        raise Undetermined(_UNKNOWN_GATE)
    return TpRule(2, blocks)


def _cut_mixer(match: re.Match[str], facts: ParameterRules) -> TpRule:
    """Cut a state-space layer, ``MambaMixer``, or linear attention, ``GatedDeltaNet``.

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
        raise Undetermined("the layer's out_proj, A_log and conv1d do not determine its parts")
    inner, count, state = out[1], heads[0], (conv[0] - out[1]) // 2
    mamba = match["module"] == "mixer"
    convolved = (inner, state, state) if mamba else (state, state, inner)
    projected = (inner, *convolved, count) if mamba else (*convolved, inner, count, count)
    blocks: tuple[int, ...] = projected if leaf.startswith("in_proj") else convolved
    if sum(blocks) != shapes[match[0]][0]:
        rows = shapes[match[0]][0]
        raise Undetermined(f"it has {rows} rows, but its layer's other tensors give {sum(blocks)}")
    return TpRule(0, blocks)


def _cut_down(match: re.Match[str], facts: ParameterRules) -> TpRule:
    """Determine if latent attention's down projections are replicated, or cut as in old layers."""
    projection, rows, args = match[2], facts.shapes[match[0]][0], facts.args
    latent = args.integer("q_lora_rank" if projection == "q" else "kv_lora_rank")
    shared = 0 if projection == "q" else args.integer("qk_pos_emb_head_dim")
    if latent is None or shared is None:
        raise Undetermined("the arguments state no latent sizes to tell whether it is replicated")
    if rows == latent + shared:
        return REPLICATED
    if rows * args.degree("TP") == latent + shared:
        return COLUMN
    raise Undetermined(f"it has {rows} rows, the arguments say {latent + shared}")


RULES: RuleTable[ParameterRules] = RuleTable(
    "Megatron",
    (
        (re.compile(r"(.*\.)?(linear_fc1|dense_h_to_4h)\.(weight|bias)[0-9]*"), _cut_gated),
        (_GROUPED, _cut_grouped),
        (
            re.compile(
                r"(?P<head>(?:.*\.)?(?P<module>mixer|self_attention)\.)"
                r"(?P<leaf>in_proj\.weight|conv1d\.(?:weight|bias)|out_proj\.weight|norm\.weight"
                r"|A_log|D|dt_bias)"
            ),
            _cut_mixer,
        ),
        (re.compile(".*"), lambda match, facts: facts.stated.get(match[0])),
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
            _cut_rows,
        ),
        (re.compile(r"(.*\.)?linear_(q|kv)_down_proj\.(weight|bias)"), _cut_down),
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


def view_experts(name: str, local: tuple[int, ...], experts: int) -> tuple[int, ...]:
    """Return the shape under which a rank's parameter is read: ``GroupedMLP``'s by expert."""
    grouped = _GROUPED.fullmatch(name)
    if grouped is None or len(local) != 2:
        return local
    first = local[0] if grouped[2] == "1" else local[0] // experts
    return (experts, first, local[0] * local[1] // (experts * first))


# Parameters


class LocalParameter(Struct, frozen=True):
    """A parameter as one rank holds it.

    ``name`` is its name in the whole model and ``local`` its shape on the rank. ``view`` is the
    storage that it shares with others, and the element at which it begins there. ``stacked`` means
    that its first dim counts the rank's experts. ``fit`` is its place in the whole one, if the
    checkpoint itself records that.
    """

    name: str
    rank: Rank
    local: tuple[int, ...]
    dtype: DType
    view: tuple[str, int] | None = None
    stacked: bool = False
    fit: Fit | None = None

    @property
    def numel(self) -> int:
        return Box.whole(self.local).volume


class ParameterRules(Struct):
    """The rules by which the ranks' parameters fit together.

    ``degrees`` are those of tensor, pipeline and expert parallelism; ``user_rules`` the user's,
    ``stated`` those saved with parameters (``partition_dim``), ``shapes`` a rank's shape of each.
    """

    args: Arguments
    degrees: Rank
    user_rules: GivenRules
    stated: dict[str, TpRule] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def fit(self, parameter: LocalParameter) -> Fit:
        """Return where a rank's parameter belongs in the whole one; Undetermined if unknown."""
        cuts = []
        if parameter.stacked:
            cuts.append(RankCut(0, parameter.rank[2], self.degrees[2]))
        index, degree = self._find_rank(parameter)
        rule = self._find_rule(parameter, degree) if parameter.local else REPLICATED
        if rule.dim is not None:
            cuts.append(RankCut(rule.dim, index, degree, rule.blocks))
        return fit_rank(parameter.local, cuts)

    def _find_rule(self, parameter: LocalParameter, degree: int) -> TpRule:
        name = parameter.name
        rule = self.user_rules(name)
        if rule is not None:
            return rule
        if degree == 1 or not self.shapes[name]:
            return REPLICATED
        return RULES.find(name, self)

    def _find_rank(self, parameter: LocalParameter) -> tuple[int, int]:
        """Return tensor-parallel rank and degree: experts may have a degree of their own."""
        degree = self.degrees[0]
        expert_degree = self.args.integer("expert_tensor_parallel_size")
        if is_expert(parameter.name) and expert_degree is not None and degree % expert_degree == 0:
            degree = expert_degree
        return parameter.rank[0] % degree, degree


Fragments = dict[tuple[str, ...], list[tuple[LocalParameter, TensorEntry]]]
"""By kind (``model``, ``fp32``, ``exp_avg``, ...) and name: the ranks' shards of a parameter, as
they are stored, in whatever shape."""


def add_fragments(fragments: Fragments, additions: Fragments) -> None:
    """Add the parts of parameters on more ranks, or in other files."""
    for path, parts in additions.items():
        fragments.setdefault(path, []).extend(parts)


def merge_fragments(
    fit: Callable[[LocalParameter], Fit], fragments: Fragments
) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """Return the tensors ``kind.name`` that ranks' parts form, and why others cannot be joined."""
    tensors: dict[str, TensorEntry] = {}
    conflicts: dict[str, str] = {}
    for path, parts in fragments.items():
        name = ".".join(path)
        try:
            fits = [fit(parameter) for parameter, _ in parts]
        except Undetermined as error:
            shapes = [parameter.local for parameter, _ in parts]
            why = report_unmerged(name, parts[0][0].name, shapes, error, "sharding-unrecorded")
            conflicts[name] = why
            continue
        dtypes = {shard.dtype for _, shard in parts if shard.chunks}
        if len(dtypes) != 1:
            kinds = f"ranks hold it as {' and '.join(sorted(map(str, dtypes)))}"
            message = f"{name}: {kinds if dtypes else 'none of its elements is stored'}"
            conflicts[name] = Problem(message, "ranks-disagree", tensor=name)
            continue
        try:
            shards = [reshape(shard, parameter.local) for parameter, shard in parts]
            tensors[name] = merge_shards(name, path, shards, fits)
        except Damaged as error:
            conflicts[name] = error.message
    return tensors, conflicts
