"""``ckptool diff``: names, shapes and types; what changed most; the model of a config.json."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import case, run_command
from safetensors.torch import save_file
from torchtitan_states import recorded, write_config
from typer.testing import CliRunner

import ckptool
from ckptool.cli.app import app
from ckptool.commands.verify.compare import model
from ckptool.commands.verify.compare.changes import module_of
from ckptool.commands.verify.compare.fit import prefix_changes
from ckptool.errors import Unrecognized, Unsupported, UsageError

STATE = {
    "embed.weight": torch.arange(12.0).reshape(3, 4),
    **{f"layers.{i}.w": torch.full((2, 2), float(i + 1)) for i in range(3)},
    "layers.0.steps": torch.tensor([1, 2]),
    "head.weight": torch.ones(3, 4),
}


@pytest.fixture
def a(tmp_path: Path) -> Path:
    save_file(STATE, tmp_path / "a.safetensors")
    return tmp_path / "a.safetensors"


def saved(path: Path, **changes: Any) -> Path:
    torch.save({**STATE, **{n.replace("__", "."): t for n, t in changes.items()}}, path)
    return path


def test_names_shapes_and_types_are_compared_and_no_data_is_read(
    a: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = {**STATE, "head.weight": torch.ones(5, 4), "bias": torch.ones(1)}
    other["embed.weight"] = other["embed.weight"].bfloat16()
    del other["layers.2.w"]
    large = torch.zeros(1 << 20)
    save_file(STATE | {"large": large}, a)
    save_file(other | {"large": large + 1}, tmp_path / "b.safetensors")
    read: list[int] = []
    whole = os.preadv

    def count(descriptor: int, buffers: Any, *rest: Any) -> int:
        read.append(sum(map(len, buffers)))
        return whole(descriptor, buffers, *rest)

    monkeypatch.setattr(os, "preadv", count)
    report = ckptool.diff(a, tmp_path / "b.safetensors")
    assert [entry.name for entry in report.only_a] == ["layers.2.w"]
    assert [entry.name for entry in report.only_b] == ["bias"]
    assert [(p.a.name, p.a.shape, p.b.shape) for p in report.shapes] == [
        ("head.weight", (3, 4), (5, 4))
    ]
    assert [(p.a.name, p.b.dtype.name) for p in report.types] == [("embed.weight", "bfloat16")]
    assert report.alike == 4
    assert not report.ok
    assert report.summary == (
        "DIFFERENT: 1 tensor only in A, 1 only in B, 1 of another shape, 1 of another type"
    )
    assert sum(read) < 64 << 10


def test_the_same_names_shapes_and_types_are_alike_whatever_the_values(
    a: Path, tmp_path: Path
) -> None:
    other = saved(tmp_path / "b.pt", embed__weight=torch.zeros(3, 4))
    report = ckptool.diff(a, other)
    assert report.ok
    assert report.summary == "SAME NAMES, SHAPES AND TYPES: 6 tensors; contents not compared"
    assert not ckptool.diff(a, other, values=True).ok


def test_names_of_values_are_names_whatever_the_values(a: Path, tmp_path: Path) -> None:
    one = saved(tmp_path / "one.pt", step=7)
    other = saved(tmp_path / "other.pt", step=8)
    whole = "SAME NAMES, SHAPES AND TYPES: 6 tensors, 1 value by name; contents not compared"
    assert ckptool.diff(one, other).summary == whole
    for first, second in ((one, saved(tmp_path / "less.pt")), (a, one), (one, a)):
        report = ckptool.diff(first, second)
        assert (report.ok, report.summary) == (False, "DIFFERENT: 1 other difference")
        assert ckptool.diff(first, second, drop=["step"]).ok


def test_a_folder_that_lacks_a_value_of_the_others_side_file(a: Path, tmp_path: Path) -> None:
    for name, values in (("one", {"step": 7, "lr": 0.1}), ("other", {"step": 7}), ("none", {})):
        ckptool.convert(saved(tmp_path / f"{name}.pt", **values), tmp_path / name, to="hf")
    for other in ("other", "none"):
        assert not ckptool.diff(tmp_path / "one", tmp_path / other).ok
        assert not ckptool.diff(tmp_path / other, tmp_path / "one").ok


def test_what_changed_most_comes_first(a: Path, tmp_path: Path) -> None:
    moved = {"layers__0__w": 0.5, "layers__2__w": 0.25}
    changes = {n: STATE[n.replace("__", ".")] * (1 + r) for n, r in moved.items()}
    changes["head__weight"] = STATE["head.weight"].clone()
    changes["head__weight"][1, 2] = float("nan")
    changes["layers__0__steps"] = torch.tensor([1, 5])
    report = ckptool.diff(a, saved(tmp_path / "b.pt", **changes), values=True)
    found = [(each.tensor.name, each.relative) for each in report.changed]
    assert [name for name, _ in found] == [
        "head.weight", "layers.0.steps", "layers.0.w", "layers.2.w"
    ]  # fmt: skip
    assert found[0][1] != found[0][1]
    assert [value for _, value in found[1:]] == pytest.approx([3 / 5**0.5, 0.5, 0.25])
    modules = {m.module: (m.tensors, m.changed, m.relative) for m in report.modules}
    assert modules["layers.0"][:2] == (2, 2)
    assert modules["layers.0"][2] == pytest.approx(((9 + 4 * 0.25) / (5 + 4)) ** 0.5)
    assert modules["layers.2"][:2] == (1, 1)
    assert modules["layers.2"][2] == pytest.approx(0.25)
    assert "layers.1" not in modules


def test_lists_are_shown_by_what_differs_in_them(tmp_path: Path) -> None:
    betas = {"betas": (0.9, 0.95), "names": ["a", "b"], "args": {"lr": 1.0, "out": "x"}}
    other = {"betas": (0.9, 0.98), "names": ["a", "b", "c"], "args": {"lr": 2.0, "seed": 1}}
    for file, values in (("a.pt", betas), ("b.pt", other)):
        torch.save({"w": torch.ones(1), "all": [values]}, tmp_path / file)
    report = ckptool.diff(tmp_path / "a.pt", tmp_path / "b.pt", values=True)
    messages = " ".join(finding.message for finding in report.findings)
    assert "A 0.95, B 0.98" in messages
    assert "A 2 items, B 3" in messages
    assert "a list" not in messages


def test_a_counter_does_not_hide_how_its_module_changed(tmp_path: Path) -> None:
    for file, step in (("a.pt", 1000.0), ("b.pt", 2000.0)):
        moments = torch.full((4,), 1 + step / 1e5)
        state = {"exp_avg": moments, "step": torch.tensor(step)}
        torch.save(
            {"optim": {"layers.0.w": state}, "count.step": torch.tensor(step)}, tmp_path / file
        )
    report = ckptool.diff(tmp_path / "a.pt", tmp_path / "b.pt", values=True)
    changes = {each.module: each.relative for each in report.modules}
    assert changes["optim.layers.0"] == pytest.approx(0.01 / 1.01)
    assert changes["count"] == 1.0


def test_nan_is_marked(a: Path, tmp_path: Path) -> None:
    other = saved(tmp_path / "b.pt", head__weight=torch.full((3, 4), torch.nan))
    shown = CliRunner().invoke(app, ["diff", str(a), str(other), "--values"]).stdout
    assert "NaN" in shown
    assert shown.splitlines()[-1].startswith("DIFFERENT: 1 tensor changed, 1 with NaN")


def test_a_change_from_zero_is_infinite(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(2), "c": torch.zeros(1) + 1j}, tmp_path / "a.pt")
    torch.save({"w": torch.ones(2), "c": torch.zeros(1) + 2j}, tmp_path / "b.pt")
    report = ckptool.diff(tmp_path / "a.pt", tmp_path / "b.pt", values=True)
    assert [(c.tensor.name, c.relative) for c in report.changed] == [("w", float("inf")), ("c", 1)]


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("model.layers.3.mlp.up.weight", "model.layers.3"),
        ("embed.weight", "embed"),
        ("weight", "weight"),
        ("optim.state.0.exp_avg", "optim.state.0"),
        ("0", "0"),
    ],
)
def test_the_module_of_a_tensor(name: str, module: str) -> None:
    assert module_of(name) == module


@pytest.mark.parametrize(
    ("change", "option"),
    [
        (lambda n: f"module.{n}", "--strip-prefix module"),
        (lambda n: f"net.{n}", "--strip-prefix net"),
        (lambda n: n.replace("layers.", "layers._orig_mod."), "_orig_mod"),
    ],
)
def test_what_would_fit_the_names_does(change: Any, option: str, a: Path, tmp_path: Path) -> None:
    torch.save({change(name): tensor for name, tensor in STATE.items()}, tmp_path / "m.pt")
    report = ckptool.diff(tmp_path / "m.pt", a)
    assert report.fit is not None
    assert option in report.fit.option
    assert (report.fit.common, report.fit.wanted) == (6, 6)
    flag, _, value = report.fit.option.partition(" ")
    keyword: dict[str, Any] = {flag[2:].replace("-", "_"): value.strip("'")}
    assert ckptool.diff(tmp_path / "m.pt", a, **keyword).ok


def test_a_prefix_that_only_b_has_is_put_before(a: Path, tmp_path: Path) -> None:
    torch.save({f"module.{name}": tensor for name, tensor in STATE.items()}, tmp_path / "m.pt")
    report = ckptool.diff(a, tmp_path / "m.pt")
    assert report.fit is not None
    assert report.fit.option == "--rename '^=module.'"


def test_the_model_of_a_training_checkpoint_fits_an_export_of_it(tmp_path: Path) -> None:
    source = case("dcp_fsdp2_tp").path
    ckptool.convert(source, tmp_path / "m.safetensors", to="safetensors", model_only=True)
    report = ckptool.diff(source, tmp_path / "m.safetensors")
    assert report.fit is not None
    assert report.fit.option == "--model-only"
    assert ckptool.diff(source, tmp_path / "m.safetensors", model_only=True, values=True).ok


def test_a_key_map_is_suggested_where_no_prefix_fits(tmp_path: Path) -> None:
    tensors = {side: tensors_of(recorded("llama3")[side]) for side in ("trainer", "hf")}
    hf = write_config("llama3", tmp_path / "hf")
    save_file(tensors["hf"], hf / "model.safetensors")
    torch.save({"model": tensors["trainer"]}, tmp_path / "m.pt")
    report = ckptool.diff(tmp_path / "m.pt", hf)
    assert report.fit is not None
    assert report.fit.option == f"--model-only --map torchtitan-llama3 --hf-assets {hf}"
    options: Any = {"model_only": True, "map": "torchtitan-llama3", "hf_assets": hf}
    assert ckptool.diff(tmp_path / "m.pt", hf, **options).ok


def tensors_of(arrays: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def test_nothing_is_suggested_where_nothing_fits(a: Path, tmp_path: Path) -> None:
    torch.save({"other": torch.ones(1)}, tmp_path / "m.pt")
    assert ckptool.diff(a, tmp_path / "m.pt").fit is None


def test_a_rename_that_fits_a_few_names_is_not_suggested(a: Path, tmp_path: Path) -> None:
    names = [f"m.{name}" if at < 2 else f"other.{at}" for at, name in enumerate(STATE)]
    torch.save(dict(zip(names, STATE.values(), strict=True)), tmp_path / "m.pt")
    assert ckptool.diff(a, tmp_path / "m.pt").fit is None


OLD = ("model.layers", "model.norm", "visual.blocks", "lm_head")
NEWER = {
    "of a part": ("model.language_model.layers", "model.language_model.norm", "model.visual.blocks",
                  "lm_head"),
    "of each part": ("text.layers", "text.norm", "vision.blocks", "head.lm_head"),
}  # fmt: skip


@pytest.mark.parametrize("newer", NEWER)
def test_several_renames_are_hinted_at_once(newer: str, tmp_path: Path) -> None:
    """As between the names of Qwen2.5-VL in files and in memory."""
    files = []
    for file, parts in (("a", OLD), ("b", NEWER[newer])):
        names = [f"{part}.{at}.proj.weight" for part in parts for at in range(3)]
        files.append(tmp_path / f"{file}.safetensors")
        save_file({name: torch.ones(2) for name in names}, files[-1])
    for one, other in (files, files[::-1]):
        fit = ckptool.diff(one, other).fit
        assert fit is not None
        assert fit.common == 12
        _, *rules = fit.option.replace("'", "").split("--rename ")
        assert len(rules) > 1
        assert ckptool.diff(one, other, rename=[rule.strip() for rule in rules]).ok


def test_no_rename_is_made_of_a_common_last_word(tmp_path: Path) -> None:
    save_file({"a.weight": torch.ones(1), "b.bias": torch.ones(1)}, tmp_path / "a.safetensors")
    save_file({"x.y.weight": torch.ones(1), "z.bias": torch.ones(1)}, tmp_path / "b.safetensors")
    assert ckptool.diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors").fit is None


# The model of a config.json


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model as transformers saves it, and its config.json alone in a folder beside it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("llama")
    sizes = {"hidden_size": 8, "intermediate_size": 16, "vocab_size": 10, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=2, tie_word_embeddings=True)
    network = LlamaForCausalLM(config)
    network.save_pretrained(folder / "hf")
    network.config.save_pretrained(folder / "config")
    torch.save(network.state_dict(), folder / "tied.pt")
    return folder


@pytest.mark.parametrize("source", ["hf", "tied.pt"])
@pytest.mark.parametrize("other", ["config", "config/config.json", "hf/config.json"])
@pytest.mark.parametrize("by", ["its config alone", "transformers"])
def test_what_a_model_saved_is_what_its_config_asks_for(
    source: str, other: str, by: str, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by == "transformers":
        monkeypatch.setattr(model, "shapes_of", lambda config: None)
    else:
        monkeypatch.setitem(sys.modules, "transformers", None)
    report = ckptool.diff(llama / source, llama / other)
    assert report.ok
    assert report.b.model == "LlamaForCausalLM"


@pytest.mark.parametrize("by", ["its config alone", "transformers"])
def test_a_config_of_another_name_is_known_by_its_content(
    by: str, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "llama-small.json"
    other.write_bytes((llama / "config" / "config.json").read_bytes())
    if by == "transformers":
        monkeypatch.setattr(model, "shapes_of", lambda config: None)
    else:
        monkeypatch.setitem(sys.modules, "transformers", None)
    report = ckptool.diff(llama / "hf", other)
    assert report.ok
    assert report.b.model == "LlamaForCausalLM"
    assert ckptool.verify(llama / "hf", like=other).ok
    other.write_text('{"steps": 3}')
    with pytest.raises(Unrecognized):
        ckptool.diff(llama / "hf", other)


def test_experts_are_separate_in_files_and_packed_in_memory(tmp_path: Path) -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 16, "vocab_size": 10, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 4}
    network = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, num_experts=2))
    network.save_pretrained(tmp_path / "hf")
    torch.save(network.state_dict(), tmp_path / "m.pt")
    for source in ("hf", "m.pt"):
        assert ckptool.diff(tmp_path / source, tmp_path / "hf" / "config.json").ok


def test_why_a_state_dict_does_not_load(llama: Path, tmp_path: Path) -> None:
    state = torch.load(llama / "tied.pt", weights_only=True)
    del state["lm_head.weight"], state["model.norm.weight"]
    state["model.embed_tokens.weight"] = torch.zeros(12, 8)
    torch.save(state, tmp_path / "m.pt")
    report = ckptool.diff(tmp_path / "m.pt", llama / "config")
    assert [entry.name for entry in report.only_b] == ["model.norm.weight"]
    assert [pair.a.name for pair in report.shapes] == ["model.embed_tokens.weight"]


def test_a_model_has_no_values(llama: Path) -> None:
    with pytest.raises(UsageError, match="without values"):
        ckptool.diff(llama / "hf", llama / "config", values=True)


def test_a_config_that_transformers_does_not_know(tmp_path: Path, a: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    with pytest.raises(Unsupported, match="cannot make its model"):
        ckptool.diff(a, tmp_path / "config.json")


def test_without_transformers(tmp_path: Path, a: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(Unsupported, match="needs transformers"):
        model.open_model(tmp_path / "config.json", ())


# The command


def test_exit_codes_and_json(a: Path, tmp_path: Path) -> None:
    def run(*words: object) -> Any:
        return CliRunner().invoke(app, ["diff", *map(str, words)])

    other = saved(tmp_path / "b.pt", head__weight=torch.zeros(3, 4))
    assert run(a, a, "-q").exit_code == 0
    assert run(a, other).exit_code == 0
    done = run(a, other, "--values", "--json")
    found = json.loads(done.stdout)
    assert done.exit_code == 1
    assert found["schema"] == "ckptool.diff/2"
    assert [(c["tensor"], c["relative"], c["differing"]) for c in found["changed"]] == [
        ("head.weight", 1.0, 12)
    ]
    assert run(a, tmp_path / "nowhere").exception.exit_code == 3
    assert run(a, other, "--rtol", "1").exception.exit_code == 2


def test_a_damaged_side_is_not_compared(flipped: Path, a: Path) -> None:
    (flipped / ".metadata").write_bytes(b"")
    for sides in ([flipped, a], [a, flipped]):
        done = CliRunner().invoke(app, ["diff", *map(str, sides)])
        assert done.exit_code == 3
        assert "FAILED: not compared: damaged" in done.stdout


def test_types_alone_are_compared_with_a_cast(tmp_path: Path) -> None:
    weights = torch.linspace(-1, 1, 6).reshape(2, 3)
    torch.save({"w": weights, "step": 1}, tmp_path / "a.pt")
    torch.save({"w": weights.bfloat16(), "step": 1}, tmp_path / "b.pt")
    places = tmp_path / "a.pt", tmp_path / "b.pt"
    told = run_command("diff", *places)
    assert told.stdout.splitlines()[-2:] == [
        "DIFFERENT: 1 tensor of another type",
        "hint: --values --cast compares them, rounded to the coarser type of both",
    ]
    assert "nothing-compared" not in run_command("diff", *places, "--values").stdout
    equal = run_command("diff", *places, "--values", "--dtype", "bf16").stdout
    assert "bit by bit, 1 of them after a cast to bf16, 1 non-tensor value" in equal
    against = run_command("verify", tmp_path / "b.pt", "--against", tmp_path / "a.pt").stdout
    assert "hint: --cast compares weights of other types" in against
    assert against.splitlines()[-1] == "DIFFERENT: 1 difference"


def test_names_of_very_many_steps_have_few_tails() -> None:
    """All tails of a million steps are terabytes."""
    name, wanted = f"{'a.' * 1_000_000}layers.0.w", f"{'b.' * 1_000_000}layers.0.w"
    (change,) = prefix_changes([name], [wanted])
    assert (change.changed(name), change.old[-4:]) == (wanted, "a.a.")
