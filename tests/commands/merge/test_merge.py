"""Averages, differences and splices are what torch computes in 64 bits, cast once."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import bits, case
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner
from unfilled import save_unfilled

import ckptool
from ckptool.cli.app import app
from ckptool.core.mesh import Shard
from ckptool.errors import CkptoolError

Tensors = dict[str, torch.Tensor]
LABELS = ("a", "b", "c")


def model(seed: int) -> Tensors:
    random = torch.Generator().manual_seed(seed)
    return {
        "embed.weight": torch.randn(301, 64, generator=random).bfloat16(),
        "layers.0.w": torch.randn(64, 33, generator=random),
        "layers.0.bias": torch.randn(7, generator=random).half(),
        "layers.0.wide": torch.randn(2, 3, 5, generator=random).double(),
        "layers.0.steps": torch.tensor([seed, 7]),
        "scale": torch.tensor(1.5 + seed),
    }


MODELS = {label: model(seed) for seed, label in enumerate(LABELS)}


@pytest.fixture
def places(tmp_path: Path) -> list[str]:
    for label, tensors in MODELS.items():
        save_file(tensors, tmp_path / f"{label}.safetensors", {"format": "pt"})
    return [str(tmp_path / f"{label}.safetensors") for label in LABELS]


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["merge", *words])
    if isinstance(result.exception, CkptoolError):
        return result.exception.exit_code, str(result.exception)
    return result.exit_code, " ".join(result.output.split())


def merged(out: Path, *words: str) -> Tensors:
    code, said = run(str(out), *words)
    assert code == 0, said
    return load_file(out)


def expect(found: Tensors, compute: Callable[[list[torch.Tensor]], torch.Tensor]) -> None:
    """Compare with a loop in 64 bits; what is no floating tensor with dims is the first's."""
    assert found.keys() == MODELS["a"].keys()
    for name, first in MODELS["a"].items():
        wanted = first
        if first.is_floating_point() and first.dim():
            wanted = compute([MODELS[label][name].double() for label in LABELS]).to(first.dtype)
        assert found[name].dtype == wanted.dtype
        assert bits(found[name]) == bits(wanted), name


def test_an_average_is_the_sum_in_64_bits_over_its_count(places: list[str], tmp_path: Path) -> None:
    found = merged(tmp_path / "out.safetensors", "--average", *places)
    expect(found, lambda terms: (terms[0] + terms[1] + terms[2]) / 3)


def test_an_average_has_weights(places: list[str], tmp_path: Path) -> None:
    found = merged(tmp_path / "out.safetensors", "--average", *places, "--weights", "1,2,0.5")
    expect(found, lambda terms: (terms[0] + terms[1] * 2 + terms[2] * 0.5) / 3.5)


def test_a_sum_takes_weights_as_they_are(places: list[str], tmp_path: Path) -> None:
    """As mergekit's linear does where ``normalize`` is false; an average divides by their sum."""
    words = ("--sum", *places, "--weights", "0.7,0.5,-0.1")
    code, said = run(str(tmp_path / "out.safetensors"), *words, "--dry-run")
    assert code == 0
    assert "4 tensors = 0.7 * a.safetensors + 0.5 * b.safetensors - 0.1 * c.safetensors" in said
    found = merged(tmp_path / "out.safetensors", *words)
    expect(found, lambda terms: terms[0] * 0.7 + terms[1] * 0.5 + terms[2] * -0.1)
    found = merged(tmp_path / "ones.safetensors", "--sum", *places[:2], "--weights", "1,-1")
    expect(found, lambda terms: terms[0] - terms[1])
    recipe = tmp_path / "merge.toml"
    recipe.write_text("sources = ['a.safetensors', 'b.safetensors']\nsum = true\n")
    found = merged(tmp_path / "all.safetensors", "--recipe", str(recipe))
    expect(found, lambda terms: terms[0] + terms[1])


def test_a_moving_average_begins_with_the_oldest(places: list[str], tmp_path: Path) -> None:
    found = merged(tmp_path / "out.safetensors", "--ema", "0.5", *places)
    expect(found, lambda terms: terms[0] * 0.25 + terms[1] * 0.25 + terms[2] * 0.5)


def test_a_difference_is_added_in_scale(places: list[str], tmp_path: Path) -> None:
    a, b, c = places
    words = ("--onto", a, "--add", b, "--minus", c, "--scale", "0.3")
    found = merged(tmp_path / "out.safetensors", *words)
    expect(found, lambda terms: terms[0] + terms[1] * 0.3 + terms[2] * -0.3)


def test_names_are_taken_from_another(places: list[str], tmp_path: Path) -> None:
    a, b, c = places
    words = ("--average", a, b, "--take", "embed", "FROM", c, "--take", "*.bias", "from", b)
    found = merged(tmp_path / "out.safetensors", *words)
    assert torch.equal(found["embed.weight"], MODELS["c"]["embed.weight"])
    assert torch.equal(found["layers.0.bias"], MODELS["b"]["layers.0.bias"])
    mean = ((MODELS["a"]["layers.0.w"].double() + MODELS["b"]["layers.0.w"].double()) / 2).float()
    assert torch.equal(found["layers.0.w"], mean)
    ckptool.merge(tmp_path / "two.safetensors", b, take={"embed": tmp_path / "c.safetensors"})
    wanted = MODELS["b"] | {"embed.weight": MODELS["c"]["embed.weight"]}
    found = load_file(tmp_path / "two.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_a_recipe_says_the_same(places: list[str], tmp_path: Path) -> None:
    (tmp_path / "recipes").mkdir()
    recipe = tmp_path / "recipes" / "merge.toml"
    recipe.write_text(
        "sources = ['../a.safetensors', '../b.safetensors']\naverage = true\nweights = [3, 1]\n"
        "[take]\n'embed' = '../c.safetensors'\n"
    )
    found = merged(tmp_path / "one.safetensors", "--recipe", str(recipe))
    a, b, c = places
    words = ("--average", a, b, "--weights", "3,1", "--take", "embed", "FROM", c)
    other = merged(tmp_path / "two.safetensors", *words)
    assert all(torch.equal(found[name], other[name]) for name in other)


def test_formats_and_sharding_may_differ(places: list[str], tmp_path: Path) -> None:
    dcp = tmp_path / "dcp"
    ckptool.convert(places[1], dcp, to="dcp")
    out = tmp_path / "out"
    code, said = run(str(out), "--average", places[0], str(dcp), "--to", "dcp", "--json")
    assert code == 0, said
    assert json.loads(said)["schema"] == "ckptool.merge/2"
    plain = merged(tmp_path / "plain.safetensors", "--average", *places[:2])
    with ckptool.open(out) as opened:
        for name, wanted in plain.items():
            assert torch.equal(torch.as_tensor(opened.read(name)), wanted), name


def test_shards_of_a_mesh_are_averaged_as_one_model(tmp_path: Path) -> None:
    source = str(case("dcp_fsdp2_tp").path)
    code, said = run(str(tmp_path / "out"), "--average", source, source, "--to", "hf")
    assert code == 0, said
    words = ("--model-only", "--against", source)
    result = CliRunner().invoke(app, ["verify", str(tmp_path / "out"), *words])
    assert result.exit_code == 0, result.output


def test_the_type_is_asked_for_and_computed_numbers_are_rounded_once(
    places: list[str], tmp_path: Path
) -> None:
    found = merged(tmp_path / "out.safetensors", "--average", *places, "--dtype", "bf16")
    for name in ("layers.0.w", "layers.0.wide"):
        terms = [MODELS[label][name].double() for label in LABELS]
        wanted = ((terms[0] + terms[1] + terms[2]) / 3).bfloat16()
        assert torch.equal(found[name], wanted), name


def test_dry_run_says_what_each_tensor_is(places: list[str], tmp_path: Path) -> None:
    code, said = run(str(tmp_path / "out.safetensors"), "--average", *places, "--dry-run")
    assert code == 0
    assert "4 tensors = (a.safetensors + b.safetensors + c.safetensors) / 3" in said
    assert "2 tensors = a.safetensors layers.0.steps scale" in said
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ((), "no operation is given"),
        (("--average", "{a}"), "--average: needs two SRC or more, 1 is given"),
        (("--sum", "{a}", "--weights", "1"), "--sum: needs two SRC or more, 1 is given"),
        (("--sum", "--average", "{a}", "{b}"), "--average and --sum: one at a time"),
        (("--ema", "0.5", "{a}", "{b}", "--weights", "1,2"), "only with --average or --sum"),
        (("--average", "{a}", "{b}", "--weights", "1"), "--weights: 1 for 2 SRC"),
        (("--average", "{a}", "{b}", "--weights", "1,-1"), "--weights: they add up to 0"),
        (("--average", "{a}", "{b}", "{c}", "--weights", "0.1,0.2,-0.3"), "they add up to 0"),
        (("--average", "{a}", "{b}", "--weights", "1e308,1e308"), "add up to no finite number"),
        (("--average", "{a}", "{b}", "--weights", "1,,1"), "not numbers"),
        (("--average", "{a}", "{b}", "--weights", "1,x"), "not numbers"),
        (("--ema", "1.5", "{a}", "{b}"), "--ema 1.5: between 0 and 1"),
        (("--average", "--ema", "0.5", "{a}", "{b}"), "--average and --ema: one at a time"),
        (("--average", "{a}", "{b}", "--scale", "2"), "--scale: only with --add or --minus"),
        (("--add", "{a}", "{b}"), "--add and --minus take no SRC"),
        (("--minus", "{a}"), "--minus {a}: taken from nothing"),
        (("--minus", "{a}", "--scale", "0.5"), "--minus {a}: taken from nothing"),
        (("--add", "{a}"), "--add {a}: added to nothing"),
        (("{a}", "--take", "embed"), "--take needs 3 words"),
        (("{a}", "--take", "embed", "OF", "{b}"), "invalid --take embed OF {b}: expected"),
        (("{a}", "--take", "embed", "FROM", "--dry-run"), "expected GLOB FROM SRC"),
        (("{a}", "--take", "embed", "FROM", ""), "--take: empty path"),
        (("{a}", "--take", "embed", "FROM", "{none}"), "no such file"),
        (("{a}", "--take", "embde", "FROM", "{b}"), "--take 'embde' matches none of"),
        (("{a}", "{b}", "--take", "embed", "FROM", "{b}"), "needs one SRC"),
        (
            ("{a}", "--take", "embed", "FROM", "{b}", "--take", "*", "FROM", "{c}"),
            "--take 'embed' FROM {b}: a later --take takes all of it",
        ),
        (("--average", "{a}", "{less}"), "lacks 1 of 6 tensors of"),
        (("--average", "{a}", "{bent}"), "layers.0.w: [64, 33] in"),
        (("--average", "{a}", "{none}"), "no such file"),
        (
            ("--average", "{a}", "{b}", "--drop", "*"),
            "{a}: no tensors of a model, which is what merge",
        ),
    ],
)
def test_what_makes_no_merge_is_refused(
    places: list[str], tmp_path: Path, words: tuple[str, ...], wanted: str
) -> None:
    less = {name: tensor for name, tensor in MODELS["b"].items() if name != "embed.weight"}
    save_file(less, tmp_path / "less.safetensors")
    bent = MODELS["b"] | {"layers.0.w": torch.zeros(33, 64)}
    save_file(bent, tmp_path / "bent.safetensors")
    names = {name: str(tmp_path / f"{name}.safetensors") for name in (*LABELS, "less", "bent")}
    names["none"] = str(tmp_path / "none")
    out = tmp_path / "out.safetensors"
    code, said = run(str(out), *(word.format(**names) for word in words))
    assert code != 0
    assert wanted.format(**names) in said
    assert not out.exists()


def test_what_has_no_model_is_answered_with_what_the_command_has(tmp_path: Path) -> None:
    moments = {"optimizer": {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": []}}
    torch.save(moments, tmp_path / "o.pt")
    source, target = str(tmp_path / "o.pt"), str(tmp_path / "made.pt")
    hints = []
    for words in (["merge", target, "--average", source, source], ["convert", source, target]):
        is_merge = words[0] == "merge"
        error = CliRunner().invoke(app, [*words, *([] if is_merge else ["--model-only"])]).exception
        assert isinstance(error, CkptoolError)
        hints.append(str(error.hint))
    assert ["--with-optimizer" in hint for hint in hints] == [True, False]


def test_damage_is_named_with_the_checkpoint_that_has_it(tmp_path: Path) -> None:
    for label in ("x", "y"):
        (tmp_path / label).mkdir()
        save_file(MODELS["a"], tmp_path / label / "model.safetensors")
    file = tmp_path / "y" / "model.safetensors"
    os.truncate(file, 300)
    for place in (tmp_path / "y", file):
        code, said = run(str(tmp_path / "o"), "--average", str(tmp_path / "x"), str(place))
        assert code == 3
        assert said.startswith(f"{place}: ")
        assert said.count("model.safetensors") == 1


def test_another_vocabulary_is_answered_with_rows(places: list[str], tmp_path: Path) -> None:
    more = MODELS["b"] | {"embed.weight": torch.zeros(304, 64)}
    other = str(tmp_path / "more.safetensors")
    save_file(more, other)
    words = ["merge", str(tmp_path / "o.pt"), "--average", places[0], other]
    error = CliRunner().invoke(app, words).exception
    assert isinstance(error, CkptoolError)
    assert "embed.weight: [301, 64] in" in str(error)
    assert "--rows 'embed.weight=304' --fill mean" in str(error.hint)
    grow = ("--rows", "embed.weight=304", "--fill", "mean")
    grown = merged(tmp_path / "grown.safetensors", places[0], *grow)
    assert grown["embed.weight"].shape == (304, 64)


def test_a_source_that_is_changed_meanwhile_is_noticed(places: list[str], tmp_path: Path) -> None:
    from ckptool.commands.merge import prepare_merge
    from ckptool.commands.options.merge import ExpressionOptions, MergeOptions
    from ckptool.errors import Changed

    options = MergeOptions(expression=ExpressionOptions(average=True))
    planned = prepare_merge([*map(Path, places)], tmp_path / "out.safetensors", options)
    os.utime(places[2])
    with pytest.raises(Changed, match=r"c\.safetensors"):
        planned.run()
    assert not (tmp_path / "out.safetensors").exists()


def test_what_a_recipe_made_is_proved_later(places: list[str], tmp_path: Path) -> None:
    recipe = tmp_path / "merge.toml"
    recipe.write_text("sources = ['a.safetensors', 'b.safetensors']\nema = 0.9\n")
    out = tmp_path / "out.safetensors"
    merged(out, "--recipe", str(recipe), "--dtype", "bf16")
    words = ["verify", str(out), "--recipe", str(recipe), "--dtype", "bf16"]
    assert CliRunner().invoke(app, words).exit_code == 0
    assert ckptool.verify_merge(out, recipe, dtype="bf16")
    data = bytearray(out.read_bytes())
    data[-3] ^= 1
    out.write_bytes(data)
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 1
    assert "DIFFERENT" in result.output


@pytest.mark.parametrize("how", [("--workers", "1"), ("--budget", "28MiB"), ("--workers", "4")])
def test_bits_do_not_depend_on_tiles_and_workers(
    places: list[str], tmp_path: Path, how: tuple[str, ...]
) -> None:
    plain, other = tmp_path / "plain.safetensors", tmp_path / "other.safetensors"
    merged(plain, "--ema", "0.7", *places)
    merged(other, "--ema", "0.7", *places, *how)
    assert plain.read_bytes() == other.read_bytes()


@pytest.mark.parametrize("verify", [True, False])
def test_doubles_beyond_the_range_of_singles_are_noted(tmp_path: Path, *, verify: bool) -> None:
    huge = torch.ones(3, 5).double()
    huge[0, 0], huge[1, 2], huge[2] = 1e300, 1e39, torch.inf
    for name in ("a", "b"):
        save_file({"w": huge}, tmp_path / f"{name}.safetensors")
    places = (str(tmp_path / "a.safetensors"), str(tmp_path / "b.safetensors"))
    words = ("--average", *places, "--dtype", "fp32", *([] if verify else ["--no-verify"]))
    code, said = run(str(tmp_path / "out.safetensors"), *words)
    assert code == 0
    counted = "2 values of 1 tensor (w) became infinite in float32: finite before, beyond"
    uncounted = "--no-verify: values beyond the range of float32 become infinite uncounted"
    assert (counted if verify else uncounted) in said
    code, said = run(str(tmp_path / "same.safetensors"), "--average", *places)
    assert code == 0
    assert "infinite" not in said


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_beyond_the_range_of_their_sources_are_noted(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    for name, size in (("a", 3e38), ("b", 1e38)):
        numbers = torch.tensor([[1, size, -size], [torch.inf, torch.nan, 1]]).to(dtype)
        save_file({"w": numbers}, tmp_path / f"{name}.safetensors")
    a, b = (str(tmp_path / f"{name}.safetensors") for name in "ab")
    said = str(dtype).removeprefix("torch.")
    note = f"2 values of 1 tensor (w) became infinite in {said}: finite before, beyond its range"
    uncounted = f"--no-verify: values beyond the range of {said} become infinite uncounted"
    sums, average = ("--onto", a, "--add", b), ("--average", a, b, "--weights", "0.1,0.7")
    for number, (words, wanted) in enumerate(
        ((sums, note), ((*sums, "--no-verify"), uncounted), (average, None))
    ):
        code, said = run(str(tmp_path / f"{number}.safetensors"), *words)
        assert code == 0, said
        assert (wanted in said) if wanted else ("infinite" not in said)


def test_parts_make_the_same_file_as_one_run(places: list[str], tmp_path: Path) -> None:
    plain, other = tmp_path / "plain.safetensors", tmp_path / "other.safetensors"
    merged(plain, "--average", *places)
    for part in ("1/2", "2/2"):
        assert run(str(other), "--average", *places, "--part", part)[0] == 0
    assert run(str(other), "--average", *places, "--finish")[0] == 0
    assert plain.read_bytes() == other.read_bytes()


def test_another_recipe_does_not_continue_a_part(places: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    assert run(str(out), "--average", *places, "--part", "1/2")[0] == 0
    code, said = run(str(out), "--average", *places, "--weights", "1,1,2", "--part", "2/2")
    assert code != 0, said


def test_an_interrupted_merge_ends_byte_equal(
    places: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckptool.engine.formulas.weighted import WeightedSum

    plain, other = tmp_path / "plain.safetensors", tmp_path / "other.safetensors"
    merged(plain, "--average", *places)
    compute = WeightedSum.__call__

    def fail(self: WeightedSum, gather: object, at: object, box: object, dtype: object) -> object:
        if at.stored[0].name == "layers.0.w":  # type: ignore[attr-defined]
            raise KeyboardInterrupt
        return compute(self, gather, at, box, dtype)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(WeightedSum, "__call__", fail)
        assert run(str(other), "--average", *places, "--workers", "1")[0] != 0
    assert not other.exists()
    assert run(str(other), "--average", *places, "--resume")[0] == 0
    assert plain.read_bytes() == other.read_bytes()


def test_the_optimizer_is_merged_on_demand(tmp_path: Path) -> None:
    source = str(case("dcp_fsdp2").path)
    alone, whole = tmp_path / "alone", tmp_path / "whole"
    code, said = run(str(alone), "--average", source, source, "--to", "dcp")
    assert code == 0
    assert "names: `model.` removed" in said
    assert "excluded: 1 non-tensor value (--with-optimizer keeps all)" in said
    words = ("--average", source, source, "--to", "dcp", "--with-optimizer")
    code, said = run(str(whole), *words)
    assert code == 0
    assert "excluded" not in said
    with ckptool.open(source) as before, ckptool.open(whole) as after, ckptool.open(alone) as model:
        assert after.keys() == before.keys()
        assert len(model) < len(before)
        assert ckptool.compare(source, whole)


def test_counters_are_those_of_the_first_whatever_their_type(tmp_path: Path) -> None:
    for at, label in enumerate("ab"):
        numbers = torch.full((3,), float(at))
        state = {"exp_avg": numbers, "step": numbers.clone()}
        saved = {
            "model": {"step.weight": numbers.clone()},
            "optimizer": {"state": {"step.weight": state}},
            "train_state": {"tokens": numbers.clone()},
            "rng_state": numbers.clone(),
        }
        torch.save(saved, tmp_path / f"{label}.pt")
    words = ("--average", str(tmp_path / "a.pt"), str(tmp_path / "b.pt"), "--with-optimizer")
    code, said = run(str(tmp_path / "o"), *words, "--to", "dcp")
    assert code == 0, said
    with ckptool.open(tmp_path / "o") as opened:
        found = {name: float(opened.read(name)[0]) for name in opened}
    assert found == {
        "model.step.weight": 0.5,
        "optimizer.state.step.weight.exp_avg": 0.5,
        "optimizer.state.step.weight.step": 0,
        "train_state.tokens": 0,
        "rng_state": 0,
    }


def test_the_newest_complete_steps_of_a_run_are_averaged(tmp_path: Path) -> None:
    for step, label in enumerate(LABELS, 1):
        (tmp_path / f"run/step-{step}").mkdir(parents=True)
        save_file(MODELS[label], tmp_path / f"run/step-{step}/model.safetensors")
    torn = tmp_path / "run/step-4/model.safetensors"
    torn.parent.mkdir()
    torn.write_bytes((tmp_path / "run/step-1/model.safetensors").read_bytes()[:-9])
    out = tmp_path / "out.safetensors"
    found = merged(out, "--average", str(tmp_path / "run"), "--last", "2")
    first, second = MODELS["b"]["layers.0.w"], MODELS["c"]["layers.0.w"]
    assert torch.equal(found["layers.0.w"], ((first.double() + second.double()) / 2).float())
    code, said = run(str(tmp_path / "o"), "--average", str(tmp_path / "run"), "--last", "5")
    assert code == 2
    assert "has 3 complete steps of 4" in said


def test_the_newest_steps_prove_nothing_later(places: list[str], tmp_path: Path) -> None:
    for step, label in enumerate(LABELS, 1):
        (tmp_path / f"run/step-{step}").mkdir(parents=True)
        save_file(MODELS[label], tmp_path / f"run/step-{step}/model.safetensors")
    recipe, out = tmp_path / "m.toml", tmp_path / "out.safetensors"
    recipe.write_text("sources = ['run']\naverage = true\nlast = 2\n")
    merged(out, "--recipe", str(recipe))
    result = CliRunner().invoke(app, ["verify", str(out), "--recipe", str(recipe)])
    assert isinstance(result.exception, CkptoolError)
    assert "last = 2: the newest steps may be others now" in str(result.exception)
    recipe.write_text("sources = ['run/step-2', 'run/step-3']\naverage = true\n")
    words = ["verify", str(out), "--recipe", str(recipe)]
    assert CliRunner().invoke(app, words).exit_code == 0


def test_python_merges_as_the_command_does(places: list[str], tmp_path: Path) -> None:
    one, two = tmp_path / "one.safetensors", tmp_path / "two.safetensors"
    merged(one, "--average", *places, "--weights", "2,1,1")
    report = ckptool.merge(two, *places, average=True, weights=[2, 1, 1])
    assert report.written
    assert report.counts == {
        "(2 * a.safetensors + b.safetensors + c.safetensors) / 4": 4,
        "a.safetensors": 2,
    }
    assert one.read_bytes() == two.read_bytes()


def test_python_takes_paths_of_what_is_added(places: list[str], tmp_path: Path) -> None:
    one, two = tmp_path / "one.safetensors", tmp_path / "two.safetensors"
    merged(one, "--onto", places[0], "--add", places[1])
    assert ckptool.merge(two, onto=Path(places[0]), add=Path(places[1])).written
    assert one.read_bytes() == two.read_bytes()


def test_names_of_one_tensor_stay_that(tmp_path: Path) -> None:
    for seed, label in enumerate(LABELS):
        shared = torch.randn(50, 8, generator=torch.Generator().manual_seed(seed))
        head = shared if label != "c" else shared.clone()
        torch.save({"embed": shared, "head": head}, tmp_path / f"{label}.pt")
    a, b, c = (str(tmp_path / f"{label}.pt") for label in LABELS)
    assert run(str(tmp_path / "out.pt"), "--average", a, b)[0] == 0
    found = torch.load(tmp_path / "out.pt")
    assert found["embed"].data_ptr() == found["head"].data_ptr()
    code, said = run(str(tmp_path / "no.pt"), "--average", a, c)
    assert code != 0
    assert "embed, head: one tensor in" in said


def test_the_result_is_written_for_a_mesh(places: list[str], tmp_path: Path) -> None:
    plain, out = tmp_path / "plain.safetensors", tmp_path / "out"
    merged(plain, "--average", *places, "--dtype", "bf16")
    words = ("--average", *places, "--dtype", "bf16", "--mesh", "dp=2,tp=2")
    code, said = run(str(out), *words)
    assert code == 0, said
    assert ckptool.compare(plain, out)
    with ckptool.open(out) as opened:
        placements = opened.tensors["layers.0.w"].placements or ()
        assert any(isinstance(each, Shard) for each in placements)
    assert len({*out.glob("*.distcp")}) == 4


def test_replicas_of_a_source_that_differ_are_refused(tmp_path: Path) -> None:
    for label in ("a", "b"):
        (tmp_path / label).mkdir()
        for rank in range(2):
            save_unfilled(tmp_path / label / f"model_rank{rank}.pt", rank if label == "b" else 1)
    sources = [str(tmp_path / label) for label in ("a", "b")]
    code, said = run(str(tmp_path / "out.safetensors"), "--average", *sources)
    assert code == 3
    assert "rank 0 and rank 1 hold different values" in said
    assert not (tmp_path / "out.safetensors").exists()


def test_parts_that_pair_other_tensors_are_not_joined(tmp_path: Path) -> None:
    one, two = tmp_path / "one.safetensors", tmp_path / "two.safetensors"
    save_file({"p": torch.zeros(4000), "q": torch.zeros(4000)}, one)
    save_file({"u": torch.full((4000,), 2.0), "v": torch.full((4000,), 10.0)}, two)
    straight = ("--rename", "^(?:u|p)$=p", "--rename", "^(?:v|q)$=q")
    crossed = ("--rename", "^(?:v|p)$=p", "--rename", "^(?:u|q)$=q")
    out = str(tmp_path / "out")
    words = ("--average", str(one), str(two), "--to", "hf", "--max-shard-size", "17KB")
    assert run(out, *words, *straight, "--part", "1/2")[0] == 0
    code, said = run(out, *words, *crossed, "--part", "2/2")
    assert code != 0
    assert "plan" in said


def test_a_dequantized_merge_for_a_mesh_says_nothing_of_quantization(tmp_path: Path) -> None:
    for seed, label in enumerate(("a", "b")):
        folder = tmp_path / label
        folder.mkdir()
        numbers = torch.randn(128, 128, generator=torch.Generator().manual_seed(seed))
        codes = {
            "w.weight": numbers.to(torch.float8_e4m3fn),
            "w.weight_scale_inv": torch.ones(1, 1),
        }
        save_file(codes, folder / "model.safetensors")
        quantized = {"quant_method": "fp8", "weight_block_size": [128, 128]}
        config = {"model_type": "llama", "quantization_config": quantized}
        (folder / "config.json").write_text(json.dumps(config))
    out, sources = tmp_path / "out", [str(tmp_path / label) for label in ("a", "b")]
    words = ("--average", *sources, "--dequantize", "--mesh", "2", "--to", "sharded-state")
    code, said = run(str(out), *words)
    assert code == 0, said
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    code, said = run(str(tmp_path / "no"), *words, "--single-rank")
    assert code == 2
    assert "--single-rank: not with --mesh" in said


def test_what_lies_beside_the_first_source_is_carried(places: list[str], tmp_path: Path) -> None:
    for label, source in zip(LABELS, places, strict=True):
        ckptool.convert(source, tmp_path / label, to="dcp")
        config = {"model_type": "llama", "of": label}
        (tmp_path / label / "config.json").write_text(json.dumps(config))
    sources = [str(tmp_path / label) for label in LABELS]
    assert run(str(tmp_path / "out"), "--average", *sources, "--to", "hf")[0] == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["of"] == "a"


def test_pipelines_of_models_are_averaged(tmp_path: Path) -> None:
    sources = [str(case("diffusers_pipeline").path), str(tmp_path / "vae")]  # a folder's name, too
    shutil.copytree(sources[0], sources[1])
    out = tmp_path / "out"
    assert run(str(out), "--average", *sources)[0] == 0
    assert ckptool.compare(sources[0], out)
    assert {path.name for path in out.iterdir()} == {
        path.name for path in (tmp_path / "vae").iterdir()
    }


def test_a_pattern_means_something_in_one_source(places: list[str], tmp_path: Path) -> None:
    a, b, _ = places
    more = {f"m.{name}": tensor for name, tensor in MODELS["b"].items()}
    save_file(more | {"m.extra": torch.ones(3)}, tmp_path / "more.safetensors")
    words = ("--average", a, str(tmp_path / "more.safetensors"))
    code, said = run(str(tmp_path / "no.safetensors"), *words, "--strip-prefix", "m")
    assert code == 4
    assert "extra" in said
    changes = (("--strip-prefix", "m"), ("--rename", "^m\\.="))
    plain = merged(tmp_path / "plain.safetensors", "--average", a, b)
    for number, change in enumerate(changes):
        out = tmp_path / f"{number}.safetensors"
        code, said = run(str(out), *words, "--drop", "m.extra", *change)
        assert code == 0, said
        assert "--drop m.extra matches 1 tensor: m.extra" in said
        found = load_file(out)
        assert all(torch.equal(found[name], plain[name]) for name in plain)
        assert found.keys() == plain.keys()
    picked = ("--select", "layers.0.w", "--select", "m.layers.0.w", "--strip-prefix", "m")
    assert merged(tmp_path / "picked.safetensors", *words, *picked).keys() == {"layers.0.w"}


@pytest.mark.parametrize("option", ["--drop", "--select", "--rename"])
def test_a_pattern_that_means_nothing_anywhere_is_refused(
    places: list[str], tmp_path: Path, option: str
) -> None:
    asked = "lyers" if option != "--rename" else "lyers=x"
    words = ("--average", *places, option, asked, "--drop", "embed")
    code, said = run(str(tmp_path / "no.safetensors"), *words)
    assert code == 2
    assert f"{option} '{asked}' matches none of" in said


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_numbers_are_summed_in_their_parts(tmp_path: Path, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(1)
    terms = [torch.randn(301, 7, 2, generator=random).double() for _ in "ab"]
    part = dtype.to_real()
    for label, term in zip("ab", terms, strict=True):
        tensors = {"freqs": torch.view_as_complex(term.to(part)), "n": torch.ones((), dtype=dtype)}
        torch.save(tensors, tmp_path / f"{label}.pt")
    torch.save({"freqs": terms[0][..., 0], "n": torch.ones(())}, tmp_path / "real.pt")
    a, b, real = (str(tmp_path / f"{label}.pt") for label in ("a", "b", "real"))
    assert run(str(tmp_path / "out.pt"), "--average", a, b, "--weights", "1,2")[0] == 0
    found = torch.load(tmp_path / "out.pt")
    first, second = (term.to(part).double() for term in terms)
    assert bits(torch.view_as_real(found["freqs"])) == bits(((first + second * 2) / 3).to(part))
    for one, other, said in (
        (a, real, f"{str(dtype)[6:]} in {a}"),
        (real, a, f"float64 in {real}"),
    ):
        code, answer = run(str(tmp_path / "no.pt"), "--average", one, other)
        assert code == 4
        assert f"freqs: {said}" in answer


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float32])
def test_numbers_that_a_sum_makes_infinite_are_counted(tmp_path: Path, dtype: torch.dtype) -> None:
    torch.save({"w": torch.full((4,), 3e38, dtype=dtype)}, tmp_path / "a.pt")
    words = ("--onto", str(tmp_path / "a.pt"), "--add", str(tmp_path / "a.pt"))
    code, said = run(str(tmp_path / "out.pt"), *words)
    assert code == 0
    assert "4 values of 1 tensor (w) became infinite in" in said
    assert "bf16" not in said
    assert torch.load(tmp_path / "out.pt")["w"].real.isinf().all()


def test_dry_run_folds_only_names_that_there_are(tmp_path: Path) -> None:
    names = ("layers.0.experts.2", "layers.1.experts.3", "\x1b[31mred")
    for label in ("a", "b"):
        save_file({name: torch.ones(2) for name in names}, tmp_path / f"{label}.safetensors")
    sources = [str(tmp_path / f"{label}.safetensors") for label in ("a", "b")]
    code, said = run(str(tmp_path / "out.safetensors"), "--average", *sources, "--dry-run")
    assert code == 0
    assert "layers.0.experts.2 layers.1.experts.3" in said
    assert "\x1b" not in said


def test_an_export_beside_the_steps_is_none_of_the_newest(tmp_path: Path) -> None:
    for name, label in (("global_step1", "a"), ("global_step2", "b"), ("global_step2_hf", "c")):
        (tmp_path / "run" / name).mkdir(parents=True)
        save_file(MODELS[label], tmp_path / "run" / name / "model.safetensors")
    found = merged(tmp_path / "out.safetensors", "--average", str(tmp_path / "run"), "--last", "2")
    wanted = (MODELS["a"]["layers.0.w"].double() + MODELS["b"]["layers.0.w"].double()) / 2
    assert torch.equal(found["layers.0.w"], wanted.float())
