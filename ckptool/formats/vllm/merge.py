"""How vLLM cuts and fuses the tensors of Llama-like models (vLLM at commit 01ed47b4).

Query, key and value projections are one tensor, each rank's parts of them in this order; so are
gate and up projection. If there are fewer key-value heads than ranks, several ranks have the same
one. The vocabulary is padded to a multiple of 64 rows. The experts of ``FusedMoE`` are one tensor
per rank: ``w13_weight`` is ``[experts, gate then up, hidden]``, ``w2_weight`` ``[experts, hidden,
inner]``. Tensor-parallel ranks cut the inner size of each expert, expert-parallel ones the experts;
the sizes in ``config.json`` show which. Tensors get Hugging Face's names and shapes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from ckptool.core.catalog import TensorEntry
from ckptool.core.sharding.tensor_parallel import (
    COLUMN,
    REPLICATED,
    ROW,
    GivenRules,
    RankShards,
    RuleTable,
    TpRule,
    list_shapes,
    merge_ranks,
    report_unmerged,
)
from ckptool.core.views import narrow, part_at
from ckptool.errors import Damaged, Undetermined
from ckptool.formats.companions import CONFIG, MOST_EXPERTS, size_in


class ModelSizes(Struct, frozen=True):
    """The sizes in a model's ``config.json``; None for missing ones."""

    heads: int | None = None
    key_value_heads: int | None = None
    head_size: int | None = None
    vocabulary: int | None = None
    tied: bool = False
    experts: int | None = None
    expert_inner: int | None = None


def sizes_of(config: Mapping[str, Any]) -> ModelSizes:
    """Return the sizes in a Hugging Face config."""
    heads, hidden = size_in(config, "num_attention_heads"), size_in(config, "hidden_size")
    return ModelSizes(
        heads,
        size_in(config, "num_key_value_heads") or heads,
        size_in(config, "head_dim") or (hidden // heads if hidden and heads else None),
        size_in(config, "vocab_size"),
        config.get("tie_word_embeddings") is True,
        _first_size(config, "num_experts", "n_routed_experts", "num_local_experts"),
        _first_size(config, "moe_intermediate_size", "intermediate_size"),
    )


def _first_size(config: Mapping[str, Any], *keys: str) -> int | None:
    """Return the first size that a config has, as models use several names for it."""
    return next(filter(None, (size_in(config, key) for key in keys)), None)


_EXPERTS = re.compile(r"(?P<head>(.*\.)?experts\.)(routed_experts\.)?(?P<which>w13|w2)_weight")
_ORDER_NOTE = (
    "fused experts are read as vLLM's Triton kernels keep them, the gate before up; FlashInfer's"
    " keep them the other way round, and the files do not say which it was"
)
_MEMBERS = {"w13": ("gate_proj", "up_proj"), "w2": ("down_proj",)}
_MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def _expert_entries(
    name: str, match: re.Match[str], parts: RankShards, sizes: ModelSizes, world: int
) -> Iterator[TensorEntry]:
    """Yield one tensor for each expert and projection, from ``_by_expert``."""
    members = _MEMBERS[match["which"]]
    by_expert = _by_expert(name, parts, sizes, world, gated=len(members) == 2)
    mixtral = "block_sparse_moe." in match["head"]
    for number, of_expert in enumerate(by_expert):
        for at, member in enumerate(members):
            shards = _halves(name, of_expert, at) if len(members) == 2 else of_expert
            leaf = _MIXTRAL[member] if mixtral else member
            full = f"{match['head']}{number}.{leaf}.weight"
            if len(shards) == 1:
                (whole,) = shards.values()
                yield replace(whole, name=full, path=(full,))
            else:
                rule = COLUMN if len(members) == 2 else ROW
                yield merge_ranks(full, (full,), shards, rule, world=world)


def _by_expert(
    name: str, parts: RankShards, sizes: ModelSizes, world: int, *, gated: bool
) -> list[RankShards]:
    """Return each expert's parts by rank: of every rank, or of the one that has the expert."""
    shapes = [part.shape for part in parts.values()]
    shape = shapes[0]
    if {*shapes} != {shape} or len(parts) != world or len(shape) != 3 or shape[0] > MOST_EXPERTS:
        message = f"{name}: not the fused experts of {world} ranks: {list_shapes(shapes)}"
        raise Damaged(message, "ranks-disagree", tensor=name)
    inner = shape[1] // 2 if gated else shape[2]
    if sizes.experts == shape[0] * world and sizes.expert_inner in (None, inner):
        return [{r: part_at(p, [n])} for r, p in sorted(parts.items()) for n in range(shape[0])]
    if sizes.experts in (None, shape[0]) and sizes.expert_inner in (None, inner * world):
        return [{r: part_at(p, [n]) for r, p in parts.items()} for n in range(shape[0])]
    raise Undetermined(
        f"{list(shape)} on each of {world} ranks does not match {CONFIG}:"
        f" {sizes.experts or 'unknown'} experts of inner size {sizes.expert_inner or 'unknown'}"
    )


PADDING = 64
_PLAIN = ("float32", "bfloat16", "float16")

_QKV = re.compile(r"(?P<head>(.*\.)?)qkv_proj\.(?P<leaf>weight|bias)")
_OUTPUT = re.compile(r"(?P<head>(.*\.)?)(o|out)_proj\.weight")
_GATE_UP = re.compile(r"(?P<head>(.*\.)?)gate_up_proj\.(?P<leaf>weight|bias)")
VOCABULARY = re.compile(r"(.*\.)?(embed_tokens|lm_head)\.(weight|bias)")


_Facts = tuple[RankShards, int]
"""The ranks' parts of a tensor, and the number of ranks."""


def _output_rule(_: re.Match[str], facts: _Facts) -> TpRule:
    """Return columns; vision models may have a whole projection of this name on every rank."""
    _require_part(*facts)
    return ROW


_TABLE: RuleTable[_Facts] = RuleTable(
    "vLLM",
    (
        (re.compile(r"(.*\.)?out_proj\.weight"), _output_rule),
        (VOCABULARY, COLUMN),
        (re.compile(r"(.*\.)?(q|k|v|gate|up|q_b|kv_b)_proj\.(weight|bias)"), COLUMN),
        (re.compile(r"(.*\.)?(o|down)_proj\.weight"), ROW),
        (
            re.compile(
                r"(.*\.)?(\w*norm\w*\.(weight|bias)|(o|out|down)_proj\.bias|rotary_emb\.inv_freq"
                r"|(gate|shared_expert_gate|q_a_proj|kv_a_proj_with_mqa|fused_qkv_a_proj)\.weight"
                r"|gate\.e_score_correction_bias)"
            ),
            REPLICATED,
        ),
    ),
)
"""How vLLM cuts what it does not fuse."""


def is_known(name: str) -> bool:
    """Return whether vLLM may have a tensor of this name, so that it is known how ranks cut it."""
    patterns = (_QKV, _GATE_UP, _EXPERTS, *(pattern for pattern, _ in _TABLE.rows))
    return any(pattern.fullmatch(name) for pattern in patterns)


class Merger(Struct):
    """Joins the ranks' tensors. ``unknown`` maps tensors without a known rule to the reason.

    A user's rule precedes a name, and keeps fused tensors as they are.
    """

    config: ModelSizes
    world: int
    user_rules: GivenRules
    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def merge(self, by_name: Mapping[str, RankShards]) -> None:
        """Merge all tensors, each from the local ones of all ranks that have it."""
        queries = {m["head"]: p for n, p in by_name.items() if (m := _OUTPUT.fullmatch(n))}
        for name, parts in by_name.items():
            try:
                for entry in self._entries(name, parts, queries):
                    if self.tensors.setdefault(entry.name, entry) is not entry:
                        message = f"{entry.name}: both by itself and in {name}"
                        raise Damaged(message, "ranks-disagree", tensor=entry.name)
            except Undetermined as error:
                shapes = [part.shape for _, part in sorted(parts.items())]
                self.unknown[name] = report_unmerged(name, name, shapes, error, "sharding-unknown")
            except Damaged as error:
                self.problems += error.problems

    def _entries(
        self, name: str, parts: RankShards, outputs: Mapping[str, RankShards]
    ) -> Iterator[TensorEntry]:
        rule = self.user_rules(name)
        if rule is not None:
            yield self._entry(name, parts, rule)
            return
        heads, gated = _QKV.fullmatch(name), _GATE_UP.fullmatch(name)
        experts = _EXPERTS.fullmatch(name)
        if experts or heads or gated or self.world > 1:
            _require_plain(parts)
        if heads:
            yield from self._heads(name, heads, parts, outputs.get(heads["head"]))
        elif gated:
            for at, member in enumerate(("gate_proj", "up_proj")):
                yield self._entry(_member(gated, member), _halves(name, parts, at), COLUMN)
        elif experts:
            self.notes += [_ORDER_NOTE] if _ORDER_NOTE not in self.notes else []
            yield from _expert_entries(name, experts, parts, self.config, self.world)
        else:
            if VOCABULARY.fullmatch(name):
                parts = self._without_padding(name, parts)
            is_whole = self.world == 1 and not VOCABULARY.fullmatch(name)
            yield self._entry(
                name, parts, REPLICATED if is_whole else _TABLE.find(name, (parts, self.world))
            )

    def _entry(self, name: str, parts: RankShards, rule: TpRule) -> TensorEntry:
        return merge_ranks(name, (name,), parts, rule, world=self.world)

    def _heads(
        self, name: str, match: re.Match[str], parts: RankShards, outputs: RankShards | None
    ) -> Iterator[TensorEntry]:
        """Yield query, key and value: rows of the fused tensor, in this order."""
        rows = _count_rows(name, parts)
        queries = self._query_rows(name, outputs)
        keys = (rows - queries) // 2
        if keys < 1 or queries + 2 * keys != rows:
            message = f"{name}: {rows} rows are not {queries} of queries, and keys and values"
            raise Damaged(message, "config-mismatch", tensor=name)
        holders = self._holders(name, queries, keys)
        for member, start, stop, ranks in (
            ("q_proj", 0, queries, 1),
            ("k_proj", queries, queries + keys, holders),
            ("v_proj", queries + keys, rows, holders),
        ):
            piece = {rank: _rows_of(part, start, stop) for rank, part in parts.items()}
            yield self._entry(_member(match, member), piece, TpRule(0, holders=ranks))

    def _query_rows(self, name: str, outputs: RankShards | None) -> int:
        """Return a rank's rows of queries, by the output projection, else by the config."""
        heads, size = self.config.heads, self.config.head_size
        shapes = [part.shape for part in (outputs or {}).values()]
        if shapes and len(shapes[0]) == 2:
            rows = (heads or 0) * (size or 0)
            if rows and shapes[0][1] * self.world != rows:
                _require_part(outputs or {}, self.world)
            return shapes[0][1]
        if not heads or not size:
            raise Undetermined(
                f"without {CONFIG} the files do not say which of its rows are queries"
            )
        if heads % self.world:
            raise Damaged(f"{CONFIG} says {heads} heads, which {self.world} ranks cannot share")
        return heads // self.world * size

    def _holders(self, name: str, queries: int, keys: int) -> int:
        """Return how many ranks have the same key-value head; config.json is the text model's."""
        heads, size = self.config.key_value_heads, self.config.head_size
        if not heads or not size:
            return 1
        if queries == keys and queries * self.world != (self.config.heads or 0) * size:
            return 1
        holders = max(1, self.world // heads)
        if keys * self.world != heads * size * holders:
            message = f"{name}: {keys} rows of keys on each of {self.world} ranks, but {CONFIG}"
            message += f" says {heads} key-value heads of {size}"
            raise Damaged(message, "config-mismatch", tensor=name)
        return holders

    def _without_padding(self, name: str, parts: RankShards) -> RankShards:
        """Drop the rows after the vocabulary that the last ranks have."""
        share = _count_rows(name, parts)
        vocabulary, rows = self.config.vocabulary, share * self.world
        if vocabulary is None or vocabulary == rows:
            return parts
        if not 0 < rows - vocabulary < PADDING * self.world:
            message = f"{name}: {rows:,} rows, but {CONFIG} says a vocabulary of {vocabulary:,}"
            raise Damaged(message, "config-mismatch", tensor=name)
        self.notes.append(f"{name}: dropped {rows - vocabulary} rows that pad the vocabulary")
        counts = {rank: min(share, max(0, vocabulary - rank * share)) for rank in parts}
        return {rank: _rows_of(part, 0, counts[rank]) for rank, part in parts.items()}

    def add_tied(self) -> None:
        """Add the embeddings again if the config ties them: only the first name was saved."""
        for name in [n for n in self.tensors if n.endswith("lm_head.weight")]:
            twin = name.removesuffix("lm_head.weight") + "model.embed_tokens.weight"
            if self.config.tied and twin not in self.tensors:
                self.tensors[twin] = replace(self.tensors[name], name=twin, path=(twin,))


def _member(match: re.Match[str], name: str) -> str:
    return f"{match['head']}{name}.{match['leaf']}"


def _require_plain(parts: RankShards) -> None:
    for part in parts.values():
        if part.dtype.name not in _PLAIN:
            raise Undetermined(
                f"vLLM repacks quantized weights ({part.dtype}) before it saves them, and the files"
                " do not say how"
            )


def _require_part(outputs: RankShards, world: int) -> None:
    """Raise Undetermined if an output projection may be whole, as in some vision models."""
    shape = next(iter(outputs.values())).shape
    if world > 1 and (len(shape) != 2 or shape[1] * world != shape[0]):
        raise Undetermined("an output projection of this shape may be cut or whole")


def _count_rows(name: str, parts: RankShards) -> int:
    """Return how many rows the first rank has of a tensor; Damaged for a scalar."""
    shape = next(iter(parts.values())).shape
    if not shape:
        raise Damaged(f"{name}: a scalar, of which vLLM has rows", "config-mismatch", tensor=name)
    return shape[0]


def _rows_of(part: TensorEntry, start: int, stop: int) -> TensorEntry:
    """Return some rows of a rank's shard; Damaged if it lacks them."""
    if not part.shape or not 0 <= start <= stop <= part.shape[0]:
        raise Damaged(f"{part.name}: {list(part.shape)} has no rows {start} to {stop}")
    return narrow(part, 0, start, stop)


def _halves(name: str, parts: RankShards, half: int) -> RankShards:
    """Return the first or the second half of the rows of each local tensor."""
    shapes = [part.shape for part in parts.values() if not part.shape or part.shape[0] % 2]
    if shapes:
        raise Damaged(f"{name}: {list(shapes[0])} does not have two equal halves")
    sizes = {rank: part.shape[0] // 2 for rank, part in parts.items()}
    return {
        rank: _rows_of(part, half * sizes[rank], (half + 1) * sizes[rank])
        for rank, part in parts.items()
    }
