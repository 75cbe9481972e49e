"""The example maps of the key-map page, as written there, on models of transformers."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
from bridge_models import MODELS
from bridge_states import values
from conftest import convert_to
from safetensors.numpy import load_file
from test_bridge import RECORDED, save

import ckptool
from ckptool.commands.options.rewrite import MapOptions
from ckptool.errors import Unsupported

PAGE = Path(ckptool.__file__).parent / "docs" / "key-maps.md"
MAPS = {
    tomllib.loads(text)["name"]: text
    for text in re.findall(r"```toml\n(name = .*?)```", PAGE.read_text(), re.DOTALL)
}


def written(name: str, folder: Path) -> str:
    """The file of a map of the page."""
    (folder / f"{name}.toml").write_text(MAPS[name])
    return str(folder / f"{name}.toml")


def tensors(folder: Path) -> dict[str, bytes]:
    return {n: a.tobytes() for n, a in load_file(folder / "model.safetensors").items()}


def test_every_built_in_map_is_on_the_page() -> None:
    from ckptool.commands.keymap.library import builtin_maps

    table = PAGE.read_text().partition("## The grammar")[0].replace("`-", "`torchtitan-")
    named = set(re.findall(r"`([a-z0-9.-]+)`", table))
    assert {name for name in builtin_maps() if not name.startswith("transformers-")} <= named
    assert {of for of, _, _ in MODELS.values()} <= named


def test_a_trainers_own_names(out: Path) -> None:
    save("llama", out / "hf")
    options = MapOptions(written("my-trainer", out))
    convert_to("safetensors", out / "hf", out / "there", map=options)
    found = load_file(out / "there" / "model.safetensors")
    shapes = RECORDED["llama"]["hf"]
    name = "model.layers.1.self_attn.q_proj.weight"
    halves = values(name, shapes[name]).reshape(6, 2, 5, 24)
    assert (found["block1.q"] == halves.transpose(3, 0, 2, 1).reshape(24, 60)).all()
    assert found["mlp.gate"].shape == (2, 28, 24)
    convert_to(
        "safetensors", out / "there", out / "back", map=MapOptions(options.name, assets=out / "hf")
    )
    assert tensors(out / "back") == tensors(out / "hf")


def test_gemma_3_as_the_built_in_map_has_it(out: Path) -> None:
    save("gemma3", out / "hf")
    for at, name in enumerate((written("my-gemma3", out), "megatron-gemma")):
        convert_to("safetensors", out / "hf", out / str(at), map=MapOptions(name))
    assert tensors(out / "0") == tensors(out / "1")


def test_phi_3_gives_the_same_logits_as_llama_and_the_same_tensors_in_megatron(out: Path) -> None:
    transformers = pytest.importorskip("transformers")
    import torch

    sizes = {"hidden_size": 24, "intermediate_size": 28, "num_hidden_layers": 2, "vocab_size": 37}
    heads: dict[str, float] = {
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
    }
    heads["rms_norm_eps"] = 1e-5
    model = transformers.Phi3ForCausalLM(transformers.Phi3Config(**sizes, **heads)).eval()
    model.save_pretrained(out / "phi")
    name = written("phi3-as-llama", out)
    convert_to("safetensors", out / "phi", out / "llama", map=MapOptions(name))
    llama = transformers.LlamaConfig(**sizes, **heads)
    (out / "llama" / "config.json").write_text(json.dumps(llama.to_dict()))
    made, loading = transformers.LlamaForCausalLM.from_pretrained(
        out / "llama", output_loading_info=True
    )
    assert not any(loading[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    text = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        torch.testing.assert_close(made.eval()(text).logits, model(text).logits)

    for near_miss in ("(kv (q | k | v) dim)", "(kv (q + k + v) dim)"):
        text = MAPS["phi3-as-llama"].replace("(head dim | kv dim | kv dim)", near_miss)
        for part, rest in (("q", "head dim"), ("k", "kv dim"), ("v", "kv dim")):
            text = text.replace(
                f"{part}_proj.weight [({rest})", f"{part}_proj.weight [(kv {part} dim)"
            )
        (out / "near.toml").write_text(text.replace("[dims]", "[dims]\nq = 3\nk = 1\nv = 1"))
        with pytest.raises(Unsupported, match="stores rows by group, but phi3"):
            convert_to("dcp", out / "phi", out / "near", map=MapOptions(str(out / "near.toml")))

    convert_to("safetensors", out / "llama", out / "m1", map=MapOptions("megatron-gpt"))
    convert_to("safetensors", out / "phi", out / "m2", map=MapOptions("megatron-phi3"))
    assert tensors(out / "m1") == tensors(out / "m2")
    back = MapOptions("auto", assets=out / "phi")
    done = convert_to("safetensors", out / "m2", out / "back", map=back)
    assert done.map.name == "megatron-phi3"
    assert tensors(out / "back") == tensors(out / "phi")
