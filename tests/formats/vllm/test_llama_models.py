"""Llama-like models, as vLLM joins, pads and reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Bits, bits, convert_to, read_back
from formats.vllm.vllm_loads import as_vllm_loads
from safetensors.torch import save_file

from ckptool.commands.open import open_checkpoint
from ckptool.commands.options.target import ReshardOptions
from ckptool.commands.reshard.reshard import prepare_reshard
from ckptool.core.sharding.placement import parse_mesh
from ckptool.core.sharding.tensor_parallel import parse_tp_rules
from ckptool.errors import Damaged, Unsupported

HEADS, SIZE, WIDTH, HIDDEN, WORDS = 4, 3, 8, 12, 100


def hf_model(key_value_heads: int = 2) -> dict[str, torch.Tensor]:
    """One layer under Hugging Face's names."""
    shapes = {
        "model.embed_tokens.weight": (WORDS, WIDTH),
        "model.layers.0.self_attn.q_proj.weight": (HEADS * SIZE, WIDTH),
        "model.layers.0.self_attn.k_proj.weight": (key_value_heads * SIZE, WIDTH),
        "model.layers.0.self_attn.v_proj.weight": (key_value_heads * SIZE, WIDTH),
        "model.layers.0.self_attn.q_proj.bias": (HEADS * SIZE,),
        "model.layers.0.self_attn.k_proj.bias": (key_value_heads * SIZE,),
        "model.layers.0.self_attn.v_proj.bias": (key_value_heads * SIZE,),
        "model.layers.0.self_attn.o_proj.weight": (WIDTH, HEADS * SIZE),
        "model.layers.0.mlp.gate_proj.weight": (HIDDEN, WIDTH),
        "model.layers.0.mlp.up_proj.weight": (HIDDEN, WIDTH),
        "model.layers.0.mlp.down_proj.weight": (WIDTH, HIDDEN),
        "model.layers.0.input_layernorm.weight": (WIDTH,),
        "lm_head.weight": (WORDS, WIDTH),
    }
    return {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}


def config_of(key_value_heads: int = 2, **more: Any) -> dict[str, Any]:
    sizes = {"num_attention_heads": HEADS, "num_key_value_heads": key_value_heads}
    return sizes | {"head_dim": SIZE, "hidden_size": WIDTH, "vocab_size": WORDS} | more


def as_vllm_holds(
    model: dict[str, torch.Tensor], world: int, key_value_heads: int = 2
) -> list[dict[str, torch.Tensor]]:
    """Each rank's tensors, as vLLM's layers load and keep them."""

    def rows(name: str, rank: int, parts: int = world) -> torch.Tensor:
        return model[name].chunk(parts)[rank]

    layer, holders = "model.layers.0.", max(1, world // key_value_heads)
    ranks = []
    for rank in range(world):
        local = {layer + "input_layernorm.weight": model[layer + "input_layernorm.weight"]}
        for leaf in ("weight", "bias"):
            heads = [rows(f"{layer}self_attn.q_proj.{leaf}", rank)]
            for part in "kv":
                name = f"{layer}self_attn.{part}_proj.{leaf}"
                heads.append(rows(name, rank // holders, world // holders))
            local[f"{layer}self_attn.qkv_proj.{leaf}"] = torch.cat(heads)
        halves = [rows(f"{layer}mlp.{part}_proj.weight", rank) for part in ("gate", "up")]
        local[layer + "mlp.gate_up_proj.weight"] = torch.cat(halves)
        for name in (layer + "self_attn.o_proj.weight", layer + "mlp.down_proj.weight"):
            local[name] = model[name].chunk(world, 1)[rank].contiguous()
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            padding = torch.zeros(-WORDS % 64, WIDTH, dtype=torch.bfloat16)
            local[name] = torch.cat([model[name], padding]).chunk(world)[rank].contiguous()
        ranks.append(local)
    return ranks


def saved(ranks: list[dict[str, torch.Tensor]], folder: Path, config: Any) -> Path:
    folder.mkdir()
    for rank, local in enumerate(ranks):
        save_file(local, folder / f"model-rank-{rank}-part-0.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def values_of(folder: Path, out: Path) -> dict[str, Bits]:
    """What a conversion to safetensors makes of a folder."""
    convert_to("safetensors", folder, out)
    return read_back("safetensors", out)


@pytest.mark.parametrize(("world", "heads"), [(1, 2), (2, 2), (4, 4), (4, 2), (4, 1), (2, 4)])
def test_what_vllm_cut_and_joined_comes_apart(world: int, heads: int, out: Path) -> None:
    model = hf_model(heads)
    folder = saved(as_vllm_holds(model, world, heads), out / "vllm", config_of(heads))
    assert values_of(folder, out / "hf") == {n: bits(t) for n, t in model.items()}


@pytest.mark.parametrize("world", [1, 2])
def test_without_a_config_the_output_projection_tells_the_queries(world: int, out: Path) -> None:
    folder = saved(as_vllm_holds(hf_model(), world), out / "vllm", None)
    catalog = open_checkpoint(folder).catalog
    assert catalog.tensors["model.layers.0.self_attn.k_proj.bias"].shape == (2 * SIZE,)
    assert catalog.tensors["lm_head.weight"].shape == (128, WIDTH)


def test_tied_embeddings_have_both_names_again(out: Path) -> None:
    ranks = as_vllm_holds(hf_model(), 2)
    for local in ranks:
        del local["model.embed_tokens.weight"]
    folder = saved(ranks, out / "vllm", config_of(tie_word_embeddings=True))
    found = values_of(folder, out / "hf")
    assert found["model.embed_tokens.weight"] == found["lm_head.weight"]


@pytest.mark.parametrize("world", [1, 2])
def test_what_is_written_is_what_vllm_holds(world: int, out: Path) -> None:
    model = hf_model()
    save_file(model, out / "model.safetensors")
    options = ReshardOptions(parse_mesh(str(world)), to="sharded-state")
    prepare_reshard(out / "model.safetensors", out / "vllm", options).run()
    for rank, wanted in enumerate(as_vllm_holds(model, world)):
        found = as_vllm_loads(out / "vllm", rank)
        assert {n: bits(t) for n, t in found.items()} == {n: bits(t) for n, t in wanted.items()}


@pytest.mark.parametrize(
    ("name", "tensor", "why"),
    [
        ("model.layers.0.mixer.in_proj.weight", torch.zeros(4, 4), "no rule says"),
        ("model.layers.0.self_attn.o_proj.weight", torch.zeros(2, 2).char(), "repacks"),
    ],
)
def test_what_no_rule_is_known_of_is_named(
    name: str, tensor: torch.Tensor, why: str, out: Path
) -> None:
    folder = saved([{"norm.weight": torch.ones(3), name: tensor}] * 2, out / "vllm", None)
    assert why in open_checkpoint(folder).catalog.conflicts[name]
    with pytest.raises(Damaged, match=why):
        convert_to("safetensors", folder, out / "hf")
    convert_to("safetensors", folder, out / "hf", drop=(name,))


def test_a_rule_says_how_an_unknown_name_is_cut(out: Path) -> None:
    whole = torch.randn(8, 4)
    ranks = [{"norm.weight": torch.ones(3), "mixer.in": whole.chunk(2)[r]} for r in range(2)]
    folder = saved(ranks, out / "vllm", None)
    convert_to("safetensors", folder, out / "hf", tp_rules=parse_tp_rules(["mixer.*=column"]))
    assert read_back("safetensors", out / "hf")["mixer.in"] == bits(whole)


def test_a_rule_keeps_a_fused_tensor_as_it_is(out: Path) -> None:
    model = hf_model()
    folder = saved(as_vllm_holds(model, 2), out / "vllm", config_of())
    rules = parse_tp_rules(["*gate_up_proj.weight=gated"])
    convert_to("safetensors", folder, out / "hf", tp_rules=rules)
    fused = [model[f"model.layers.0.mlp.{part}_proj.weight"] for part in ("gate", "up")]
    found = read_back("safetensors", out / "hf")["model.layers.0.mlp.gate_up_proj.weight"]
    assert found == bits(torch.cat(fused))


EXPERTS = 4


def experts_of(names: tuple[str, str, str], head: str) -> dict[str, torch.Tensor]:
    """Gate, up and down projections of each expert under Hugging Face's names."""
    gate, up, down = names
    found = {f"{head}gate.weight": torch.randn(EXPERTS, WIDTH)}
    for number in range(EXPERTS):
        for name, shape in ((gate, (6, WIDTH)), (up, (6, WIDTH)), (down, (WIDTH, 6))):
            found[f"{head}experts.{number}.{name}.weight"] = torch.randn(shape)
    return found


def fused_experts(
    model: dict[str, torch.Tensor], names: tuple[str, str, str], head: str, spread: bool
) -> list[dict[str, torch.Tensor]]:
    """What vLLM's FusedMoE holds on each of two ranks: half the experts, or half of each."""
    ranks = []
    for rank in range(2):
        numbers = range(EXPERTS)[2 * rank : 2 * rank + 2] if spread else range(EXPERTS)

        def part(number: int, name: str, dim: int, rank: int = rank) -> torch.Tensor:
            whole = model[f"{head}experts.{number}.{name}.weight"]
            return whole if spread else whole.chunk(2, dim)[rank]

        gate, up, down = names
        both = [torch.cat([part(n, gate, 0), part(n, up, 0)]) for n in numbers]
        ranks.append(
            {
                f"{head}gate.weight": model[f"{head}gate.weight"],
                f"{head}experts.w13_weight": torch.stack(both),
                f"{head}experts.w2_weight": torch.stack([part(n, down, 1) for n in numbers]),
            }
        )
    return ranks


MIXTRAL = ("w1", "w3", "w2"), "model.layers.0.block_sparse_moe."


QWEN = ("gate_proj", "up_proj", "down_proj"), "model.layers.0.mlp."


@pytest.mark.parametrize("spread", [False, True], ids=["tensor-parallel", "expert-parallel"])
@pytest.mark.parametrize(
    ("names", "head", "config"),
    [
        (*MIXTRAL, {"num_local_experts": EXPERTS, "intermediate_size": 6}),
        (*QWEN, {"num_experts": EXPERTS, "moe_intermediate_size": 6, "intermediate_size": 9}),
    ],
    ids=["mixtral", "qwen"],
)
def test_fused_experts_come_apart(
    names: tuple[str, str, str], head: str, config: dict[str, int], spread: bool, out: Path
) -> None:
    model = experts_of(names, head)
    folder = saved(fused_experts(model, names, head, spread), out / "vllm", config)
    assert values_of(folder, out / "hf") == {n: bits(t) for n, t in model.items()}
    assert any("FlashInfer" in note for note in open_checkpoint(folder).catalog.notes)


def test_fused_experts_of_other_sizes_than_the_config_are_named(out: Path) -> None:
    names, head = QWEN
    ranks = fused_experts(experts_of(names, head), names, head, spread=False)
    folder = saved(ranks, out / "vllm", {"num_experts": 16, "moe_intermediate_size": 6})
    found = open_checkpoint(folder).catalog.conflicts
    assert ["16 experts of inner size 6" in why for why in found.values()] == [True, True]


def _spoilt(kind: str, ranks: list[dict[str, torch.Tensor]], config: dict[str, Any]) -> None:
    if kind == "a rank lost":
        del ranks[0]["lm_head.weight"]
    elif kind == "other vocabulary":
        config["vocab_size"] = 1000
    elif kind == "other heads":
        config["num_key_value_heads"] = 4
    elif kind == "odd halves":
        name = "model.layers.0.mlp.gate_up_proj.weight"
        ranks[1][name] = ranks[1][name][:-1].clone()


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("a rank lost", "rank 0 has none"),
        ("other vocabulary", "vocabulary of 1,000"),
        ("other heads", "4 key-value heads"),
        ("odd halves", "two equal halves"),
    ],
)
def test_what_contradicts_itself_is_refused(kind: str, words: str, out: Path) -> None:
    ranks, config = as_vllm_holds(hf_model(), 2), config_of()
    _spoilt(kind, ranks, config)
    with pytest.raises(Damaged, match=words):
        open_checkpoint(saved(ranks, out / "vllm", config))


def vision_model(rows: int, folder: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """Two ranks' attention of a vision model, and what it is cut from."""
    name = "vision_tower.layers.0.self_attn."
    vision = {f"{name}{part}_proj.weight": torch.randn(rows, WIDTH) for part in "qkv"}
    output = torch.randn(WIDTH, rows)
    local = [
        {
            f"{name}qkv_proj.weight": torch.cat([t.chunk(2)[rank] for t in vision.values()]),
            f"{name}out_proj.weight": output.chunk(2, 1)[rank].contiguous(),
        }
        for rank in range(2)
    ]
    return saved(local, folder, config_of()), vision | {f"{name}out_proj.weight": output}


def test_a_vision_model_has_heads_of_its_own(out: Path) -> None:
    """What its output projection takes tells them, not the language model's config."""
    folder, wanted = vision_model(WIDTH, out / "vllm")
    assert values_of(folder, out / "hf") == {n: bits(t) for n, t in wanted.items()}


def test_a_vision_model_that_each_rank_may_hold_whole_is_not_joined(out: Path) -> None:
    folder, _ = vision_model(2 * WIDTH, out / "vllm")
    found = open_checkpoint(folder).catalog.conflicts
    assert ["cut or whole" in why for why in found.values()] == [True, True]


@pytest.mark.parametrize("lost", ["model-rank-0-part-0", "model-rank-1-part-0"])
def test_a_lost_file_is_missed(lost: str, out: Path) -> None:
    folder = saved(as_vllm_holds(hf_model(4), 4, 4), out / "vllm", config_of(4))
    (folder / f"{lost}.safetensors").unlink()
    with pytest.raises(Damaged, match=f"{lost}.safetensors is missing"):
        open_checkpoint(folder)


@pytest.mark.parametrize(("world", "heads"), [(2, 2), (4, 4), (4, 2), (4, 1), (2, 4)])
def test_ranks_hold_whole_key_value_heads_as_vllm_loads_them(
    world: int, heads: int, out: Path
) -> None:
    """Where a model has fewer of them than ranks, several ranks hold the same one."""
    model = hf_model(heads)
    (out / "hf").mkdir()
    save_file(model, out / "hf" / "model.safetensors")
    (out / "hf" / "config.json").write_text(json.dumps(config_of(heads)))
    options = ReshardOptions(mesh=parse_mesh(str(world)), to="sharded-state")
    prepare_reshard(out / "hf", out / "vllm", options).run()
    for rank, wanted in enumerate(as_vllm_holds(model, world, heads)):
        held = as_vllm_loads(out / "vllm", rank)
        assert {n: bits(t) for n, t in held.items()} == {n: bits(t) for n, t in wanted.items()}
    assert values_of(out / "vllm", out / "back") == {n: bits(t) for n, t in model.items()}


def test_ranks_that_cannot_share_heads_evenly_are_refused(out: Path) -> None:
    (out / "hf").mkdir()
    save_file(hf_model(2), out / "hf" / "model.safetensors")
    (out / "hf" / "config.json").write_text(json.dumps(config_of(2)))
    options = ReshardOptions(mesh=parse_mesh("3"), to="sharded-state")
    with pytest.raises(Unsupported, match="3 ranks cannot share 2 key-value heads"):
        prepare_reshard(out / "hf", out / "vllm", options)
