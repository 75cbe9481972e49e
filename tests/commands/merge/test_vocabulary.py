"""What sources that are added up say of their tokens, and in config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from merge_adapters import run, save_base, some

WORDS = ["<s>", "a", "b", "c"]
ROWS = {word: row for row, word in enumerate(WORDS)}
OTHERS = ROWS | {"b": 3, "c": 2}


def model(folder: Path, tokenizer: object, file: str = "tokenizer.json", **config: Any) -> Path:
    folder.mkdir()
    tensors = {"embed_tokens.weight": some(6, 4), "q.weight": some(3, 4)}
    save_base(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"} | config))
    (folder / file).write_text(json.dumps(tokenizer))
    return folder


def of(vocabulary: object, *added: object) -> dict[str, Any]:
    return {"model": {"vocab": vocabulary}, "added_tokens": [*added]}


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        (of(ROWS), of(OTHERS), "2 rows of other tokens, such as 2: 'b' and 'c'"),
        (of(ROWS, {"id": 4, "content": "<x>"}), of(ROWS, {"id": 4, "content": "<y>"}), "1 row of"),
        (of([[word, 0] for word in WORDS]), of(OTHERS), "2 rows of"),
        (of(ROWS), of(ROWS, {"id": 4, "content": "<y>"}), None),
        (of(ROWS), of(ROWS | {"d": 4}), None),
        (of(ROWS), {"model": 3, "added_tokens": {"a": 1}}, None),
        (of(ROWS), of([["a"], [], 5], {"id": [], "content": 3}, 7), None),
        (of(ROWS), [], None),
    ],
)
def test_other_tokens_of_a_row_are_refused(
    one: object, other: object, said: str | None, tmp_path: Path
) -> None:
    sources = model(tmp_path / "one", one), model(tmp_path / "other", other)
    code, told = run(tmp_path / "out", "--average", *sources)
    if said is None:
        assert code == 0, told
        return
    assert (code, f"one and other have other vocabularies: {said}" in told) == (4, True), told
    assert run(tmp_path / "out", "--average", *sources, "--hf-assets", sources[1])[0] == 0
    assert run(tmp_path / "rest", "--average", *sources, "--drop", "embed_tokens")[0] == 0


def test_the_file_of_a_slow_tokenizer_says_the_same(tmp_path: Path) -> None:
    sources = (model(tmp_path / n, rows, "vocab.json") for n, rows in (("a", ROWS), ("b", OTHERS)))
    code, said = run(tmp_path / "out", "--average", *sources)
    assert (code, "a and b have other vocabularies" in said) == (4, True), said


def test_another_config_is_noted(tmp_path: Path) -> None:
    config: dict[str, Any] = {
        "rope_theta": 1e4,
        "torch_dtype": "float32",
        "eos_token_id": 1,
        "_name_or_path": "x",
    }
    other: dict[str, Any] = {
        "rope_theta": 1e6,
        "torch_dtype": "bfloat16",
        "eos_token_id": 2,
        "_name_or_path": "y",
    }
    one = model(tmp_path / "one", of(ROWS), **config)
    code, said = run(tmp_path / "out", "--average", one, model(tmp_path / "b", of(ROWS), **other))
    note = "config.json of b says rope_theta 1000000.0, not 10000.0: the result has that of one"
    assert (code, note in said) == (0, True), said
    code, said = run(tmp_path / "again", "--average", one, model(tmp_path / "c", [], **config))
    assert (code, "config.json of" in said) == (0, False), said
