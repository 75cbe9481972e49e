"""One table of element types: torch's names, sizes, and the names in the formats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from msgspec import Struct

from ckptool.core.text import one_of
from ckptool.errors import UsageError


class DType(Struct, frozen=True, eq=False):
    """An element type: one of the table's, each of which is one object.

    ``name`` is torch's name without the ``torch.`` prefix, ``itemsize`` its size in bytes,
    ``kind`` one of ``float int bool complex bits``, ``safetensors`` its name in a safetensors
    header (None if that format has no name for it), ``storage`` torch's typed storage class
    (None where torch saves the tensor through ``UntypedStorage``), ``packed`` how many of what
    safetensors counts as elements are one, as small ones fill whole bytes together, and ``swap``
    the size in bytes of the unit that is reversed in a big-endian file. ``is_of_torch`` is False
    for types that torch 2.15 lacks, whose names continue its own.

    Of a float ``exponent`` is the number of bits of its exponent, and ``special`` tells the codes
    that are not finite numbers: ``ieee`` those with an exponent of ones, infinities and NaN;
    ``last`` those of ones alone but for the sign, ``minus zero`` and ``ones`` just that one: NaN.
    """

    name: str
    itemsize: int
    kind: str
    safetensors: str | None = None
    storage: str | None = None
    packed: int = 1
    is_of_torch: bool = True
    exponent: int = 0
    special: Literal["ieee", "last", "minus zero", "ones"] = "ieee"

    @property
    def is_numeric(self) -> bool:
        """Whether the elements are numbers, not privately packed bits."""
        return self.kind != "bits"

    @property
    def alignment(self) -> int:
        """What offsets of its elements in files are multiples of, in bytes."""
        return self.itemsize if self.packed == 1 else 1

    @property
    def part(self) -> DType:
        """The type of the real and the imaginary part; that of a real number is its own."""
        return BY_NAME[f"float{4 * self.itemsize}"] if self.kind == "complex" else self

    @property
    def swap(self) -> int:
        return self.part.itemsize

    @property
    def is_float8(self) -> bool:
        """Whether it is a float of eight bits with a sign."""
        return self.kind == "float" and self.itemsize == 1 and self.name != EXPONENTS

    @property
    def mantissa(self) -> int:
        """The bits of a float after its exponent; all but EXPONENTS have a sign before that."""
        return max(0, 8 * self.itemsize - 1 - self.exponent)

    @property
    def bias(self) -> int:
        """What the exponent of a float is stored with."""
        return (1 << (self.exponent - 1)) - (self.special != "minus zero")

    @property
    def first_special(self) -> int | None:
        """The least positive code of a float that is not finite; those above it are not either.

        None where only one code is, ``only_nan``.
        """
        ones = (1 << self.exponent) - 1
        codes = {"ieee": ones << self.mantissa, "last": (1 << (8 * self.itemsize - 1)) - 1}
        return codes.get(self.special)

    @property
    def only_nan(self) -> int | None:
        """The only code of a float that is not finite; None if there are several."""
        return {"minus zero": 1 << (8 * self.itemsize - 1), "ones": 0xFF}.get(self.special)

    @property
    def largest(self) -> float:
        """The largest number of a float with infinities; 0 for all other types."""
        is_infinite = self.kind == "float" and self.special == "ieee"
        return (2 - 0.5**self.mantissa) * 2.0**self.bias if is_infinite else 0.0

    def __str__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[Callable[[str], DType], tuple[str]]:
        """Unpickle to the same object in another process."""
        return _find, (self.name,)


_TABLE = (
    DType("float64", 8, "float", "F64", "DoubleStorage", exponent=11),
    DType("float32", 4, "float", "F32", "FloatStorage", exponent=8),
    DType("float16", 2, "float", "F16", "HalfStorage", exponent=5),
    DType("bfloat16", 2, "float", "BF16", "BFloat16Storage", exponent=8),
    DType("float8_e4m3fn", 1, "float", "F8_E4M3", exponent=4, special="last"),
    DType("float8_e5m2", 1, "float", "F8_E5M2", exponent=5),
    DType("float8_e4m3fnuz", 1, "float", "F8_E4M3FNUZ", exponent=4, special="minus zero"),
    DType("float8_e5m2fnuz", 1, "float", "F8_E5M2FNUZ", exponent=5, special="minus zero"),
    DType("float8_e8m0fnu", 1, "float", "F8_E8M0", exponent=8, special="ones"),
    DType("float4_e2m1fn_x2", 1, "bits", "F4", packed=2),
    DType("float6_e2m3fn_x4", 3, "bits", "F6_E2M3", packed=4, is_of_torch=False),
    DType("float6_e3m2fn_x4", 3, "bits", "F6_E3M2", packed=4, is_of_torch=False),
    DType("int64", 8, "int", "I64", "LongStorage"),
    DType("int32", 4, "int", "I32", "IntStorage"),
    DType("int16", 2, "int", "I16", "ShortStorage"),
    DType("int8", 1, "int", "I8", "CharStorage"),
    DType("uint8", 1, "int", "U8", "ByteStorage"),
    DType("uint16", 2, "int", "U16"),
    DType("uint32", 4, "int", "U32"),
    DType("uint64", 8, "int", "U64"),
    DType("bool", 1, "bool", "BOOL", "BoolStorage"),
    DType("complex32", 4, "complex"),
    DType("complex64", 8, "complex", "C64", "ComplexFloatStorage"),
    DType("complex128", 16, "complex", None, "ComplexDoubleStorage"),
    DType("bits8", 1, "bits"),
    DType("bits16", 2, "bits"),
    DType("bits1x8", 1, "bits"),
    DType("bits2x4", 1, "bits"),
    DType("bits4x2", 1, "bits"),
)

BY_NAME = {dtype.name: dtype for dtype in _TABLE}
BY_SAFETENSORS = {dtype.safetensors: dtype for dtype in _TABLE if dtype.safetensors}
QUANTIZED_STORAGES = {"QInt8Storage": "int8", "QUInt8Storage": "uint8", "QInt32Storage": "int32"}
"""torch's storages of quantized tensors: they hold integers."""

BY_STORAGE = {dtype.storage: dtype for dtype in _TABLE if dtype.storage} | {
    storage: BY_NAME[name] for storage, name in QUANTIZED_STORAGES.items()
}

SHORT_NAMES = {
    "fp64": "float64",
    "fp32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
    "half": "float16",
    "float": "float32",
    "double": "float64",
    "fp8": "float8_e4m3fn",
}


def _find(name: str) -> DType:
    return BY_NAME[name]


def short_name(name: str) -> str:
    """Return the name people use: ``bf16`` for ``bfloat16``, ``fp32`` for ``float32``."""
    return {"float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}.get(
        name, name
    )


EXPONENTS = "float8_e8m0fnu"
"""The type of scales that are powers of two (MX formats): no sign, no zero."""
SATURATES = "float8_e4m3fn"
"""Out-of-range numbers and infinities become 448, its largest, by torch 2.13, 2.15; NaN by 2.4."""
BEYOND_SATURATION = 464.0
"""The largest number that is rounded to 448: half-way to the number that would follow."""


def parse_dtype(text: str) -> DType:
    """Return the floating type called ``bf16``, ``torch.float16``, ...; UsageError if none is."""
    name = text.lower().removeprefix("torch.")
    dtype = BY_NAME.get(SHORT_NAMES.get(name, name))
    if dtype is None or dtype.kind != "float":
        floating = [candidate.name for candidate in BY_NAME.values() if candidate.kind == "float"]
        raise UsageError(
            f"invalid --dtype {text!r}: not a floating-point type",
            hint=one_of(text, floating),
        )
    if dtype.name == EXPONENTS:
        raise UsageError(
            f"invalid --dtype {text!r}: a scale type, without zero and sign",
            hint="use float8_e4m3fn or float8_e5m2 for weights",
        )
    return dtype
