"""Meta's Llama folders: ``consolidated.NN.pth``, one per model-parallel rank, and ``params.json``.

How a tensor is cut follows from its layer in Meta's code (fairscale's ``ColumnParallelLinear`` and
``RowParallelLinear``); the files do not record it. Token embeddings are cut along their width in
Llama 1 and 2 (``ParallelEmbedding``) and by rows of the vocabulary in Llama 3
(``VocabParallelEmbedding``): the width of a part shows which. If there are more ranks than
key-value heads, several ranks have the same one. Written: the same cuts, for a mesh of one dim.

Names and cuts are those of ``llama`` (1 to 3), ``llama-models`` (3.2 with vision) and Llama 4,
which fuses tensors: ``wqkv`` and ``mlp.fc1_weight`` are each rank's parts of the fused ones,
``moe_w_out_eF_D`` each rank's rows of every expert.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ckptool.core.catalog import Catalog, TensorEntry
from ckptool.core.layout import Layout
from ckptool.core.mesh import Shard
from ckptool.core.sharding.placement import PlacementRule
from ckptool.core.sharding.tensor_parallel import (
    COLUMN,
    GATED,
    REPLICATED,
    ROW,
    GivenRules,
    NamedRule,
    RuleTable,
    TpRule,
    given_rules,
    merge_ranks,
    report_unmerged,
    tp_mesh,
)
from ckptool.core.views import whole_tensor
from ckptool.errors import Damaged, Problem, Refusal, Undetermined, Unsupported
from ckptool.formats.base import (
    Detection,
    Format,
    Loading,
    Reading,
    Request,
    ScanOptions,
    Writing,
)
from ckptool.formats.companions import MOST_EXPERTS, companions, read_json_object, size_in
from ckptool.formats.writing import lay_out_companions, require_placed, select_plain
from ckptool.serialization.archive.write import archive_file
from ckptool.serialization.pickle.write import TensorRef
from ckptool.serialization.source import Source, expect_archives, find_missing_ranks, require_rank
from ckptool.serialization.state_dict.assemble import assemble
from ckptool.serialization.state_dict.leaves import Leaf, PlainLeaf, RankLeaves, read_file_leaves

_EMBEDDING = re.compile(r"(.*\.)?tok_embeddings\.weight")
RULES = tuple(
    PlacementRule(glob, style=style, required=False)
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


class LlamaSizes(Struct, frozen=True):
    """The sizes in ``params.json``; None for missing ones."""

    width: int | None = None
    heads: int | None = None
    key_value_heads: int | None = None
    head_size: int | None = None
    layers: int | None = None
    experts: int | None = None

    @property
    def arguments(self) -> str:
        """Return the sizes that distinguish models, as text."""
        sizes = {
            "dim": self.width,
            "layers": self.layers,
            "heads": self.heads,
            "kv heads": self.key_value_heads,
            "experts": self.experts,
        }
        return ", ".join(f"{word} {size}" for word, size in sizes.items() if size is not None)


def sizes_of(params: Mapping[str, Any]) -> LlamaSizes:
    """Return the sizes in the content of ``params.json``; Llama 4 has them under ``model``."""
    inner = params.get("model")
    params = inner if isinstance(inner, dict) else params
    experts = params.get("moe_args")
    width, heads = size_in(params, "dim"), size_in(params, "n_heads")
    return LlamaSizes(
        width,
        heads,
        size_in(params, "n_kv_heads") or heads,
        size_in(params, "head_dim") or (width // heads if width and heads else None),
        size_in(params, "n_layers"),
        size_in(experts, "num_experts") if isinstance(experts, dict) else None,
    )


class _Facts(Struct, frozen=True):
    """What determines a cut besides a tensor's name; ``shape`` is that of one rank's part."""

    shape: tuple[int, ...]
    sizes: LlamaSizes
    ranks: int


def _embedding_rule(_: re.Match[str], facts: _Facts) -> TpRule | None:
    """Return rows of the vocabulary if a part is as wide as the model, else columns."""
    if facts.sizes.width is None or len(facts.shape) != 2:
        return None
    return COLUMN if facts.shape[1] == facts.sizes.width else ROW


def _key_value_rule(_: re.Match[str], facts: _Facts) -> TpRule | None:
    """Return rows; several consecutive ranks have the same ones if key-value heads are few."""
    heads, size = facts.sizes.key_value_heads, facts.sizes.head_size
    if not facts.shape or not heads or not size:
        return COLUMN if facts.shape else None
    return TpRule(0, holders=max(1, facts.shape[0] * facts.ranks // (heads * size)))


def _experts_rule(_: re.Match[str], facts: _Facts) -> TpRule:
    """Return each rank's rows of every expert."""
    count = facts.sizes.experts
    if count is None:
        raise Undetermined("params.json does not say how many experts it holds")
    if count > MOST_EXPERTS:
        raise Undetermined(f"params.json says {count:,} experts; ckptool reads {MOST_EXPERTS:,}")
    return TpRule(0, (1,) * count)


def _fused_heads_rule(_: re.Match[str], facts: _Facts) -> TpRule:
    """Return query, key and value heads, one after the other in each rank's part."""
    queries, keys, ranks = facts.sizes.heads, facts.sizes.key_value_heads, facts.ranks
    if not queries or not keys:
        raise Undetermined("params.json does not say how many heads of each kind it holds")
    if queries % ranks or keys % ranks:
        raise Undetermined(f"{ranks} ranks share {queries} heads and {keys} key-value heads")
    return TpRule(0, (queries // ranks, keys // ranks, keys // ranks))


_TABLE: RuleTable[_Facts] = RuleTable(
    "Meta's code",
    (
        (_EMBEDDING, _embedding_rule),
        (re.compile(r"(.*\.)?attention\.wqkv\.(weight|bias)"), _fused_heads_rule),
        (re.compile(r"(.*\.)?feed_forward\.mlp\.fc1_weight"), GATED),
        (re.compile(r"(.*\.)?experts\.moe_w_out_eF_D"), _experts_rule),
        (re.compile(r"(.*\.)?attention\.w[kv]\.(weight|bias)"), _key_value_rule),
        (
            re.compile(
                r"(.*\.)?(((attention|attn)\.w[qkv]|feed_forward\.(w[13]|w_in_shared_FD|w_swiglu_FD)|output"
                r"|mlp\.c_fc|conv1\._linear|vision_projection)\.(weight|bias)|learnable_embedding\.weight)"
            ),
            COLUMN,
        ),
        (
            re.compile(
                r"(.*\.)?(((attention|attn)\.wo|feed_forward\.(w2|w_out_shared_DF)|mlp\.c_proj)\.weight"
                r"|feed_forward\.mlp\.fc2_weight|experts\.moe_w_(in|swiglu)_eD_F)"
            ),
            ROW,
        ),
        (
            re.compile(
                r"(.*\.)?((\w+_)?norm[._]weight|ln_\w+\.(weight|bias)|rope\.freqs|\w*gate_(attn|ffn|ffwd)"
                r"|((attention|attn)\.wo|feed_forward\.w2|mlp\.c_proj)\.bias|\w*positional_embedding\w*"
                r"|class_embedding|\w+_tile_pos_embed\.(embedding|gate)"
                r"|feed_forward\.(router_DE|expert_activation_DE|global_gate_stats_3E))"
            ),
            REPLICATED,
        ),
    ),
)


_FILE = re.compile(r"consolidated\.([0-9]{2,9})\.pth")
_PARAMS = "params.json"
_QUERIES = "attention.wq.weight"


def _files(source: Source) -> dict[int, str]:
    """Return the model-parallel ranks' files by rank."""
    matches = filter(None, map(_FILE.fullmatch, source.files))
    return {int(match[1]): match.string for match in matches}


def _scan(source: Source, options: ScanOptions) -> Catalog:
    files = _files(source)
    world = max(files) + 1
    require_rank(world, files[max(files)])
    missing = find_missing_ranks(files, world)
    if missing:
        message = f"{source.root}: consolidated.{missing[0]:02d}.pth is missing"
        message += f" (model-parallel ranks {missing} of {world})"
        raise Damaged(message, "rank-missing")
    expect_archives(source, (files[rank] for rank in sorted(files)))
    ranks = {rank: read_file_leaves(source, files[rank]) for rank in sorted(files)}
    sizes = sizes_of(read_json_object(source, _PARAMS))
    cut, conflicts, problems = _merge_cut(ranks, sizes, options.tp_rules)
    rest = {
        rank: {n: leaf for n, leaf in leaves.items() if n not in cut and n not in conflicts}
        for rank, leaves in ranks.items()
    }
    merged = assemble(rest, per_rank=options.per_rank)
    options.report([*problems, *merged.problems], subject=source.root)
    order = {name: at for at, name in enumerate(ranks[0])}
    last = len(order)
    entries = sorted((merged.tensors | cut).items(), key=lambda pair: order.get(pair[0], last))
    merged.tensors = dict(entries)
    merged.conflicts |= conflicts
    return merged.catalog(
        "llama",
        source,
        (file for _, file in sorted(files.items())),
        world_size=world,
        mesh=tp_mesh(world) if world > 1 else None,
        mesh_source="declared" if world > 1 else None,
        info=_info(sizes, world),
        companions=companions(source),
    )


def _lost_ranks(source: Source, catalog: Catalog) -> list[Problem]:
    """Return a problem if rows of queries are missing: the last ranks' files are gone."""
    sizes = sizes_of(read_json_object(source, _PARAMS))
    rows = sizes.heads * sizes.head_size if sizes.heads and sizes.head_size else None
    for name, entry in catalog.tensors.items():
        if rows and name.endswith(_QUERIES) and entry.shape and entry.shape[0] != rows:
            message = f"{name}: {entry.shape[0]:,} rows, {_PARAMS} says {rows:,}:"
            message += f" files of ranks are missing ({catalog.world_size} found)"
            return [Problem(message, "rank-missing", tensor=name)]
    return []


def _info(sizes: LlamaSizes, world: int) -> dict[str, str]:
    info = {"writer": "Meta llama (by its file names)", "parallelism": f"TP {world}"}
    return info | ({"arguments": sizes.arguments} if sizes.arguments else {})


def _merge_cut(
    ranks: Mapping[int, RankLeaves], sizes: LlamaSizes, rules: Sequence[NamedRule]
) -> tuple[dict[str, TensorEntry], dict[str, str], list[Problem]]:
    """Merge the tensors that model parallelism cuts, by name and ``params.json``.

    A user's rule precedes a name. Returns the tensors, why others without a known rule stay
    unmerged, and contradictions.
    """
    values = [(name, leaf.value) for leaves in ranks.values() for name, leaf in leaves.items()]
    names = dict.fromkeys(name for name, value in values if isinstance(value, PlainLeaf))
    user_rules = given_rules(rules, names)
    refused = {name for name, value in values if isinstance(value, Refusal)}
    sizes = _with_width(sizes, ranks[0])
    cut: dict[str, TensorEntry] = {}
    unknown: dict[str, str] = {}
    problems: list[Problem] = []
    for name in names if len(ranks) > 1 else ():
        if name in refused:
            continue
        of_ranks = {rank: leaves[name] for rank, leaves in ranks.items() if name in leaves}
        try:
            entry = _merge_tensor(name, of_ranks, sizes, user_rules, len(ranks))
        except Undetermined as error:
            shapes = [leaf.value.tensor.shape for leaf in of_ranks.values()]
            unknown[name] = report_unmerged(name, name, shapes, error, "sharding-unknown")
        except Damaged as error:
            problems += error.problems
        else:
            if entry is not None:
                cut[name] = entry
    return cut, unknown, problems


def _with_width(sizes: LlamaSizes, leaves: RankLeaves) -> LlamaSizes:
    """Return the sizes, with the model's width from the last norm if ``params.json`` lacks it."""
    norm = leaves.get("norm.weight")
    shape = norm.value.tensor.shape if norm and isinstance(norm.value, PlainLeaf) else ()
    return replace(sizes, width=sizes.width or (shape[0] if shape else None))


def _merge_tensor(
    name: str,
    of_ranks: Mapping[int, Leaf],
    sizes: LlamaSizes,
    user_rules: GivenRules,
    world: int,
) -> TensorEntry | None:
    """Return the merged tensor; None if each of ``world`` ranks has the whole of it."""
    parts: dict[int, TensorEntry] = {}
    for rank, leaf in of_ranks.items():
        value = leaf.value
        if not isinstance(value, PlainLeaf):
            message = f"{name}: a tensor on some ranks, none on rank {rank}"
            raise Damaged(message, "rank-missing", tensor=name)
        parts[rank] = whole_tensor(name, leaf.path, value.dtype, value.shape, value.place, rank)
    rule = user_rules(name)
    if rule is None:
        rule = _TABLE.find(name, _Facts(next(iter(parts.values())).shape, sizes, world))
    path = next(iter(of_ranks.values())).path
    return None if rule.dim is None else merge_ranks(name, path, parts, rule, world=world)


def lay_out(catalog: Catalog, request: Request) -> Layout:
    """Lay out a file per rank of a mesh of one dim; Unsupported if Meta's code cannot load it."""
    placed = require_placed(request)
    if len(placed.mesh.shape) != 1:
        raise Unsupported("Meta's llama files have one model-parallel dim", hint="such as --mesh 8")
    objects, notes = select_plain(catalog)
    shards = {name: placed.shards(entry) for name, entry in catalog.tensors.items()}
    for entry in catalog.tensors.values():
        _require_cut(entry, placed.placements[entry.name][0], placed.mesh.size)
    files = lay_out_companions(catalog)
    for rank in range(placed.mesh.size):
        state: dict[str, Any] = {entry.name: entry.value for entry in objects}
        for name, entry in catalog.tensors.items():
            state[name] = TensorRef.of_shard(entry, shards[name][rank])
        files.append(archive_file(f"consolidated.{rank:02d}.pth", state, rank=rank))
    if _PARAMS not in catalog.companions:
        notes.append(f"no {_PARAMS} is written, which Meta's code reads the model's sizes from")
    return Layout(tuple(files), folder=True, notes=tuple(notes))


def _require_cut(entry: TensorEntry, placement: object, ranks: int) -> None:
    """Raise Unsupported if a tensor is not cut as Meta's code cuts it, into equal parts.

    Embeddings are cut along either dim, depending on the model's generation.
    """
    if ranks == 1:
        return
    dim = placement.dim if isinstance(placement, Shard) else None
    if _EMBEDDING.fullmatch(entry.name):
        rule = TpRule(dim)
    else:
        try:
            rule = _TABLE.find(entry.name, _Facts(entry.shape, LlamaSizes(), ranks))
        except Undetermined as error:
            raise error.within(entry.name) from None
    if len(rule.blocks) > 1:
        raise Unsupported(f"{entry.name}: several tensors in one, which ckptool does not shard")
    if dim != rule.dim:
        form = "whole on every rank" if rule.dim is None else f"cut along dim {rule.dim}"
        raise Unsupported(f"{entry.name}: {placement}; Meta's code expects it {form}")
    if dim is not None and entry.shape[dim] % ranks:
        raise Unsupported(
            f"{entry.name}: {entry.shape[dim]:,} of dim {dim} do not make {ranks} equal parts,"
            " as Meta's code wants them"
        )


FORMAT = Format(
    "llama",
    "Meta llama: consolidated.NN.pth and params.json",
    Detection(
        lambda source: len(_files(source)) > (0 if _PARAMS in source.files else 1),
        names="consolidated.NN.pth",
        found=_files,
    ),
    Reading(_scan, checks=_lost_ranks, takes_tp_rules=True),
    Writing(reshard=lay_out),
    Loading(rules=lambda: RULES),
)
