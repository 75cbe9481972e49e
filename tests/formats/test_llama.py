"""Meta's consolidated files: parts as in fairscale's layers, joined and cut again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Bits, bits, convert_to, load_torch, read_back

import ckptool
from ckptool.commands.open import open_checkpoint
from ckptool.commands.options.read import ReadOptions
from ckptool.commands.options.target import ReshardOptions
from ckptool.commands.reshard.reshard import prepare_reshard
from ckptool.core.sharding.placement import parse_mesh, parse_rule
from ckptool.core.sharding.tensor_parallel import parse_tp_rules
from ckptool.errors import Damaged, Unsupported, UsageError

DIM, HEADS, SIZE, HIDDEN, WORDS = 8, 4, 2, 12, 20


def model(key_value_heads: int = 2) -> dict[str, torch.Tensor]:
    """One layer under Meta's names."""
    shapes = {
        "tok_embeddings.weight": (WORDS, DIM),
        "norm.weight": (DIM,),
        "output.weight": (WORDS, DIM),
        "layers.0.attention.wq.weight": (HEADS * SIZE, DIM),
        "layers.0.attention.wk.weight": (key_value_heads * SIZE, DIM),
        "layers.0.attention.wv.weight": (key_value_heads * SIZE, DIM),
        "layers.0.attention.wo.weight": (DIM, HEADS * SIZE),
        "layers.0.feed_forward.w1.weight": (HIDDEN, DIM),
        "layers.0.feed_forward.w2.weight": (DIM, HIDDEN),
        "layers.0.feed_forward.w3.weight": (HIDDEN, DIM),
        "layers.0.attention_norm.weight": (DIM,),
        "layers.0.ffn_norm.weight": (DIM,),
        "rope.freqs": (SIZE,),
    }
    return {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}


def dim_of(name: str, generation: int) -> int | None:
    """The dim that fairscale's layer is cut along."""
    last = name.removesuffix(".weight").rpartition(".")[2]
    if last == "tok_embeddings":
        return 0 if generation == 3 else 1
    if last in ("wq", "wk", "wv", "w1", "w3", "output"):
        return 0
    return 1 if last in ("wo", "w2") else None


def parts_of(
    whole: dict[str, torch.Tensor], world: int, generation: int = 3, key_value_heads: int = 2
) -> list[dict[str, torch.Tensor]]:
    """Each model-parallel rank's tensors."""

    def part(name: str, rank: int) -> torch.Tensor:
        dim = dim_of(name, generation)
        if dim is None:
            return whole[name].clone()
        holders = max(1, world // key_value_heads) if name[-9:-7] in ("wk", "wv") else 1
        return whole[name].chunk(world // holders, dim)[rank // holders].clone()

    return [{name: part(name, rank) for name in whole} for rank in range(world)]


def saved(parts: list[dict[str, torch.Tensor]], folder: Path, params: Any) -> Path:
    folder.mkdir()
    for rank, state in enumerate(parts):
        torch.save(state, folder / f"consolidated.{rank:02d}.pth")
    if params is not None:
        (folder / "params.json").write_text(json.dumps(params))
    return folder


def params(key_value_heads: int = 2) -> dict[str, Any]:
    return {"dim": DIM, "n_heads": HEADS, "n_kv_heads": key_value_heads, "vocab_size": -1}


def values_of(folder: Path, out: Path) -> dict[str, Bits]:
    convert_to("safetensors", folder, out)
    return read_back("safetensors", out)


def test_verify_notices_that_the_last_ranks_are_gone(out: Path) -> None:
    parts = parts_of(model(), 2)
    assert ckptool.verify(saved(parts, out / "whole", params())).ok
    report = ckptool.verify(saved(parts[:1], out / "cut", params()))
    lost = [finding for finding in report.findings if finding.code == "rank-missing"]
    assert [finding.severity.value for finding in lost] == ["error"]
    assert "4 rows, params.json says 8: files of ranks are missing (1 found)" in str(lost[0])


@pytest.mark.parametrize("said", [params(), None], ids=["params.json", "no params.json"])
@pytest.mark.parametrize("generation", [2, 3])
@pytest.mark.parametrize("world", [1, 2])
def test_parts_are_joined(world: int, generation: int, said: Any, out: Path) -> None:
    whole = model()
    folder = saved(parts_of(whole, world, generation), out / "llama", said)
    if world == 1 and said is None:
        folder /= "consolidated.00.pth"
    assert values_of(folder, out / "hf") == {n: bits(t) for n, t in whole.items()}


@pytest.mark.parametrize("heads", [1, 2])
def test_ranks_that_share_a_key_value_head(heads: int, out: Path) -> None:
    whole = model(heads)
    folder = saved(parts_of(whole, 4, 3, heads), out / "llama", params(heads))
    assert values_of(folder, out / "hf") == {n: bits(t) for n, t in whole.items()}


def test_inspect_names_sizes_and_degree(out: Path) -> None:
    folder = saved(parts_of(model(), 2), out / "llama", params())
    catalog = open_checkpoint(folder).catalog
    assert (catalog.format, catalog.world_size) == ("llama", 2)
    assert catalog.info["parallelism"] == "TP 2"
    assert catalog.info["arguments"] == "dim 8, heads 4, kv heads 2"


@pytest.mark.parametrize("generation", [2, 3])
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 4), (4, 1)])
def test_written_for_another_number_of_ranks(
    before: int, after: int, generation: int, out: Path
) -> None:
    whole = model(4)
    folder = saved(parts_of(whole, before, generation, 4), out / "llama", params(4))
    rules = (parse_rule("tok_embeddings.weight=Shard(1)"),) if generation == 2 else ()
    options = ReshardOptions(parse_mesh(str(after)), rules=rules)
    prepare_reshard(folder, out / "other", options).run()
    assert json.loads((out / "other/params.json").read_text()) == params(4)
    for rank, wanted in enumerate(parts_of(whole, after, generation, 4)):
        found = load_torch(out / f"other/consolidated.{rank:02d}.pth")
        assert {n: bits(t) for n, t in found.items()} == {n: bits(t) for n, t in wanted.items()}


def test_embeddings_stay_cut_as_they_were(out: Path) -> None:
    folder = saved(parts_of(model(4), 2, 2, 4), out / "llama", params(4))
    prepare_reshard(folder, out / "other", ReshardOptions(parse_mesh("4"))).run()
    found = load_torch(out / "other/consolidated.00.pth")["tok_embeddings.weight"]
    assert tuple(found.shape) == (WORDS, DIM // 4)


@pytest.mark.parametrize(
    ("mesh", "rule", "words"),
    [
        ("2x2", None, "one model-parallel dim"),
        ("3", None, "do not make 3 equal parts"),
        ("2", "*wo.weight=Shard(0)", "cut along dim 1"),
    ],
)
def test_what_metas_code_could_not_load_is_refused(
    mesh: str, rule: str | None, words: str, out: Path
) -> None:
    folder = saved(parts_of(model(), 2), out / "llama", params())
    rules = (parse_rule(rule),) if rule else ()
    with pytest.raises(Unsupported, match=words):
        prepare_reshard(folder, out / "o", ReshardOptions(parse_mesh(mesh), rules=rules))


def test_names_that_are_not_metas_are_refused(out: Path) -> None:
    torch.save({"model.layers.0.self_attn.q_proj.weight": torch.ones(4, 4)}, out / "m.pt")
    with pytest.raises(Unsupported, match="no rule says how Meta's code cuts it"):
        prepare_reshard(out / "m.pt", out / "o", ReshardOptions(parse_mesh("2"), to="llama"))


def test_a_name_without_a_rule_is_not_joined_even_where_the_parts_are_equal(out: Path) -> None:
    parts = [part | {"layers.0.router.weight": torch.zeros(4, 2)} for part in parts_of(model(), 2)]
    folder = saved(parts, out / "llama", params())
    assert list(open_checkpoint(folder).catalog.conflicts) == ["layers.0.router.weight"]
    with pytest.raises(Damaged, match=r"layers.0.router.weight: .* 2 ranks\): no rule"):
        convert_to("safetensors", folder, out / "hf")


def test_a_rule_says_how_an_unknown_name_is_cut(out: Path) -> None:
    whole = {"router": torch.randn(4, 6), "gated": torch.randn(8, 3), "same": torch.randn(3)}
    gates = whole["gated"].chunk(4)
    parts = [
        part
        | {
            "layers.0.router": whole["router"].chunk(2, 1)[rank].clone(),
            "layers.0.gated": torch.cat([gates[rank], gates[2 + rank]]),
            "layers.0.same": whole["same"],
        }
        for rank, part in enumerate(parts_of(model(), 2))
    ]
    folder = saved(parts, out / "llama", params())
    rules = parse_tp_rules(["*router=row", "*gated=gated", "*same=replicate"])
    convert_to("safetensors", folder, out / "hf", tp_rules=rules)
    found = read_back("safetensors", out / "hf")
    assert {n: found[f"layers.0.{n}"] for n in whole} == {n: bits(t) for n, t in whole.items()}


def test_a_rule_that_matches_nothing_is_refused(out: Path) -> None:
    folder = saved(parts_of(model(), 2), out / "llama", params())
    with pytest.raises(UsageError, match="matches none of 13"):
        open_checkpoint(folder, ReadOptions(tp_rules=parse_tp_rules(["router=row"])))


EXPERTS = 3


def llama_4() -> dict[str, torch.Tensor]:
    """The tensors whose layout is Llama 4's own, as one rank holds them."""
    shapes = {
        "tok_embeddings.weight": (WORDS, DIM),
        "norm.weight": (DIM,),
        "layers.0.attention.wqkv.weight": ((HEADS + 2 + 2) * SIZE, DIM),
        "layers.0.attention.wqkv.layer_norm_weight": (DIM,),
        "layers.0.feed_forward.mlp.fc1_weight": (2 * HIDDEN, DIM),
        "layers.0.feed_forward.mlp.fc2_weight": (DIM, HIDDEN),
        "layers.1.feed_forward.router_DE": (DIM, EXPERTS),
        "layers.1.feed_forward.experts.moe_w_in_eD_F": (EXPERTS * DIM, HIDDEN),
        "layers.1.feed_forward.experts.moe_w_swiglu_eD_F": (EXPERTS * DIM, HIDDEN),
        "layers.1.feed_forward.experts.moe_w_out_eF_D": (EXPERTS * HIDDEN, DIM),
        "layers.1.feed_forward.w_in_shared_FD.weight": (HIDDEN, DIM),
        "layers.1.feed_forward.w_out_shared_DF.weight": (DIM, HIDDEN),
        "vision_projection.weight": (DIM, 6),
    }
    return {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}


def part_of_llama_4(name: str, whole: torch.Tensor, rank: int) -> torch.Tensor:
    """What Meta's layers of two ranks hold: fused ones each rank's parts, experts as one matrix."""
    if name.endswith("wqkv.weight"):
        query, key, value = whole.split([HEADS * SIZE, 2 * SIZE, 2 * SIZE])
        return torch.cat([t.chunk(2)[rank] for t in (query, key, value)])
    if name.endswith("fc1_weight"):
        return torch.cat([half.chunk(2)[rank] for half in whole.chunk(2)])
    if name.endswith("moe_w_out_eF_D"):
        return whole.view(EXPERTS, HIDDEN, DIM).chunk(2, 1)[rank].reshape(-1, DIM).clone()
    if name.endswith(("eD_F", "DF.weight", "fc2_weight")):
        return whole.chunk(2, 1)[rank].clone()
    if name.endswith(("norm.weight", "norm_weight", "DE")):
        return whole.clone()
    return whole.chunk(2)[rank].clone()


def test_what_llama_4_fuses_is_joined(out: Path) -> None:
    whole = llama_4()
    parts = [{n: part_of_llama_4(n, t, rank) for n, t in whole.items()} for rank in range(2)]
    said = {"model": params() | {"moe_args": {"num_experts": EXPERTS}}}
    folder = saved(parts, out / "llama", said)
    assert values_of(folder, out / "hf") == {n: bits(t) for n, t in whole.items()}
    found = open_checkpoint(folder).catalog.info["arguments"]
    assert found == "dim 8, heads 4, kv heads 2, experts 3"


@pytest.mark.parametrize(
    ("name", "lacks"), [("wqkv.weight", "how many heads"), ("moe_w_out_eF_D", "how many experts")]
)
def test_what_params_json_does_not_say_is_named(name: str, lacks: str, out: Path) -> None:
    whole = {n: t for n, t in llama_4().items() if n.endswith((name, "norm.weight"))}
    parts = [{n: part_of_llama_4(n, t, rank) for n, t in whole.items()} for rank in range(2)]
    found = open_checkpoint(saved(parts, out / "llama", {"dim": DIM})).catalog.conflicts
    assert [lacks in why for why in found.values()] == [True]


def _other_norm(parts: list[dict[str, torch.Tensor]], folder: Path) -> None:
    parts[1]["norm.weight"] += 1
    torch.save(parts[1], folder / "consolidated.01.pth")


def _short_part(parts: list[dict[str, torch.Tensor]], folder: Path) -> None:
    parts[1]["output.weight"] = parts[1]["output.weight"][:, 1:].clone()
    torch.save(parts[1], folder / "consolidated.01.pth")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda parts, folder: (folder / "consolidated.00.pth").unlink(), "consolidated.00.pth"),
        (lambda parts, folder: (folder / "params.json").write_text("["), "params.json"),
        (_other_norm, "norm.weight: plain tensors that differ"),
        (_short_part, r"rank 1 bfloat16 \[10, 7\]"),
    ],
)
def test_damage_is_refused(spoil: Any, words: str, out: Path) -> None:
    parts = parts_of(model(), 2)
    folder = saved(parts, out / "llama", params())
    spoil(parts, folder)
    with pytest.raises(Damaged, match=words):
        convert_to("safetensors", folder, out / "hf")


def test_no_more_experts_are_read_than_there_can_be(out: Path) -> None:
    for rank in (0, 1):
        part = {"layers.0.feed_forward.experts.moe_w_out_eF_D": torch.zeros(4, 2)}
        torch.save(part, out / f"consolidated.0{rank}.pth")
    params = {"model": {"moe_args": {"num_experts": 10**12}}}
    (out / "params.json").write_text(json.dumps(params))
    with pytest.raises(Damaged, match="says 1,000,000,000,000 experts"):
        ckptool.convert(out, out.parent / "whole.pt", to="torch-save")
