"""Which tensors ``--dtype`` casts, and to what."""

from __future__ import annotations

import pickle

import pytest

from ckptool.core.casts import Casts, cast, parse_casts
from ckptool.core.catalog import Catalog, TensorEntry
from ckptool.core.dtype import BY_NAME
from ckptool.core.state_category import with_every_part
from ckptool.errors import UsageError

NAMES = {
    "model.w": ("float32", (4,)),
    "model.norm.weight": ("float32", (4,)),
    "model.half": ("bfloat16", (4,)),
    "model.ids": ("int64", (4,)),
    "model.scale": ("float32", ()),
    "optimizer.state.w.exp_avg": ("float32", (4,)),
    "optimizer.state.w.step": ("float32", ()),
    "meta.ema": ("float32", (4,)),
}


def test_a_type_is_one_object_wherever_it_is_sent() -> None:
    assert all(pickle.loads(pickle.dumps(dtype)) is dtype for dtype in BY_NAME.values())


def catalog() -> Catalog:
    tensors = {
        name: TensorEntry(name, tuple(name.split(".", 1)), BY_NAME[dtype], shape, ())
        for name, (dtype, shape) in NAMES.items()
    }
    return with_every_part(Catalog("dcp", tensors, {}, {}))


def types(*asked: str) -> dict[str, str]:
    """What is cast, and to what."""
    done = cast(catalog(), parse_casts(asked)).catalog.tensors
    return {n: e.dtype.name for n, e in done.items() if e.dtype.name != NAMES[n][0]}


def test_one_type_is_for_the_models_weights_alone() -> None:
    done = cast(catalog(), parse_casts(["bf16"]))
    assert [entry.name for entry in done.changed] == ["model.w", "model.norm.weight"]
    entry = done.catalog.tensors["model.w"]
    assert (entry.dtype.name, entry.source_dtype.name) == ("bfloat16", "float32")
    left, scalars = done.notes
    assert "optimizer.state.w.exp_avg, meta.ema" in left
    assert "NAME=bfloat16" in left
    assert "model.scale" in scalars


def test_a_glob_is_for_whatever_it_matches_and_goes_first() -> None:
    assert types("*exp_avg=fp16") == {"optimizer.state.w.exp_avg": "float16"}
    assert types("*norm*=fp32", "bf16") == {"model.w": "bfloat16"}
    assert types("bf16", "*norm*=fp64", "*=fp16") == {
        "model.w": "float16",
        "model.norm.weight": "float64",
        "model.half": "float16",
        "optimizer.state.w.exp_avg": "float16",
        "meta.ema": "float16",
    }


def test_nothing_is_cast_where_nothing_is_asked() -> None:
    whole = catalog()
    assert cast(whole, Casts()).catalog == whole
    assert not cast(whole, parse_casts(["optimizer.*=fp32"])).changed


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (["nothing*=bf16"], "matches none"),
        (["*.step=bf16"], "cannot cast optimizer.state.w.step"),
        (["*.ids=bf16"], "cannot cast model.ids"),
        (["bf16", "fp16"], "conflicts with"),
        (["=bf16"], "expected DTYPE or NAME=DTYPE"),
        (["w=int8"], "not a floating-point type"),
    ],
)
def test_what_makes_no_sense_is_refused(asked: list[str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        cast(catalog(), parse_casts(asked))


@pytest.mark.parametrize(
    ("names", "cast_too"),
    [
        (["a.q.qweight", "a.q.qzeros", "a.q.scales", "a.q.g_idx"], ["a.q.bias", "a.norm.weight"]),
        (["a.q.weight", "a.q.SCB"], ["a.q.bias", "a.norm.weight"]),
        (
            ["a.q.weight", "a.q.weight.absmax", "a.q.weight.quant_state.bitsandbytes__nf4"],
            ["a.norm.weight"],
        ),
        (["a.q.weight_packed", "a.q.weight_scale"], ["a.norm.weight"]),
    ],
)
def test_scales_of_any_kind_stay_as_they_are(names: list[str], cast_too: list[str]) -> None:
    tensors = {n: TensorEntry(n, (n,), BY_NAME["float32"], (4,), ()) for n in (*names, *cast_too)}
    done = cast(Catalog("hf", tensors, {}, {}), parse_casts(["bf16"]))
    assert [entry.name for entry in done.changed] == cast_too


def test_exponents_are_not_type_of_weights() -> None:
    with pytest.raises(UsageError, match="without zero and sign"):
        parse_casts(["*.weight=float8_e8m0fnu"])
