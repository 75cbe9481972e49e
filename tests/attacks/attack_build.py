"""Build checkpoints byte by byte, whatever they claim: pickles, zips, legacy files, safetensors."""

from __future__ import annotations

import json
import pickle
import struct
import zlib
from pathlib import Path
from typing import Any

LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
WEIGHT = struct.pack("<6f", *range(6))
"""The bytes of the honest tensor ``w``, float32 [2, 3]."""


# Pickle opcodes as text


def text(value: str) -> bytes:
    data = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(data)) + data


def raw(value: bytes) -> bytes:
    return b"B" + struct.pack("<I", len(value)) + value


def number(value: int) -> bytes:
    if 0 <= value < 256:
        return b"K" + bytes([value])
    data = value.to_bytes((value.bit_length() + 8) // 8, "little", signed=True)
    if len(data) < 256:
        return b"\x8a" + bytes([len(data)]) + data
    return b"\x8b" + struct.pack("<I", len(data)) + data


def glob(module: str, name: str) -> bytes:
    return b"c" + f"{module}\n{name}\n".encode()


def stack_glob(module: str, name: str) -> bytes:
    return text(module) + text(name) + b"\x93"


def put(index: int) -> bytes:
    return b"r" + struct.pack("<I", index)


def get(index: int) -> bytes:
    return b"j" + struct.pack("<I", index)


def tup(*items: bytes) -> bytes:
    return b"(" + b"".join(items) + b"t"


def lst(*items: bytes) -> bytes:
    return b"](" + b"".join(items) + b"e"


def dct(**items: bytes) -> bytes:
    return b"}(" + b"".join(text(k) + v for k, v in items.items()) + b"u"


def pairs(*items: tuple[bytes, bytes]) -> bytes:
    return b"}(" + b"".join(k + v for k, v in items) + b"u"


def call(function: bytes, *args: bytes) -> bytes:
    return function + tup(*args) + b"R"


def new(function: bytes, state: bytes | None = None) -> bytes:
    """NEWOBJ without arguments, and BUILD."""
    return function + b")\x81" + (state + b"b" if state is not None else b"")


def plain(value: Any) -> bytes:
    """Opcodes that leave a plain value on the stack."""
    data = pickle.dumps(value, 2)
    return data[2:-1]


def storage(
    key: bytes = text("0"), cls: bytes = glob("torch", "FloatStorage"), numel: bytes = number(6)
) -> bytes:
    return tup(text("storage"), cls, key, text("cpu"), numel) + b"Q"


def tensor(
    store: bytes | None = None,
    offset: bytes = number(0),
    shape: bytes | None = None,
    strides: bytes | None = None,
    extra: tuple[bytes, ...] = (),
) -> bytes:
    return call(
        glob("torch._utils", "_rebuild_tensor_v2"),
        storage() if store is None else store,
        offset,
        tup(number(2), number(3)) if shape is None else shape,
        tup(number(3), number(1)) if strides is None else strides,
        b"\x89",
        call(glob("collections", "OrderedDict")),
        *extra,
    )


def program(body: bytes, protocol: int = 2) -> bytes:
    return b"\x80" + bytes([protocol]) + body + b"."


def beside(body: bytes) -> bytes:
    """A state dict with the honest tensor ``w`` and, as ``x``, what ``body`` makes."""
    return program(dct(x=body, w=tensor()))


# Zip


def stored_zip(records: dict[str, bytes], *, deflate: tuple[str, ...] = ()) -> bytes:
    """A zip of stored (or deflated) records with right headers."""
    out, central = b"", b""
    for name, data in records.items():
        method, packed = 0, data
        if name in deflate:
            packer = zlib.compressobj(9, zlib.DEFLATED, -15)
            packed, method = packer.compress(data) + packer.flush(), 8
        encoded, crc, at = name.encode(), zlib.crc32(data), len(out)
        sizes = (crc, len(packed), len(data), len(encoded))
        out += struct.pack("<4s5H3L2H", b"PK\3\4", 20, 0, method, 0, 0, *sizes, 0) + encoded
        out += packed
        central += struct.pack(
            "<4s6H3L5H2L", b"PK\1\2", 20, 20, 0, method, 0, 0, *sizes, 0, 0, 0, 0, 0, at
        )
        central += encoded
    end = (b"PK\5\6", 0, 0, len(records), len(records), len(central), len(out), 0)
    return out + central + struct.pack("<4s4H2LH", *end)


def torch_zip(data_pkl: bytes, storages: dict[str, bytes] | None = None, **kw: Any) -> bytes:
    """A torch.save archive around any pickle."""
    records = {"archive/data.pkl": data_pkl, "archive/byteorder": b"little"}
    held = {"0": WEIGHT} if storages is None else storages
    records |= {f"archive/data/{key}": data for key, data in held.items()}
    records["archive/version"] = b"3\n"
    return stored_zip(records, **kw)


def torch_file(path: Path, data_pkl: bytes, storages: dict[str, bytes] | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(torch_zip(data_pkl, storages))
    return path


def legacy(object_pkl: bytes, *, keys: bytes | None = None, data: bytes | None = None) -> bytes:
    """A legacy torch.save stream around any pickle of the object."""
    info = {"protocol_version": 1001, "little_endian": True, "type_sizes": {}}
    parts = [pickle.dumps(value, 2) for value in (LEGACY_MAGIC, 1001, info)]
    parts += [object_pkl, program(plain(["0"])) if keys is None else keys]
    parts.append(struct.pack("<q", 6) + WEIGHT if data is None else data)
    return b"".join(parts)


# Safetensors


def safetensors(header: Any, data: bytes = WEIGHT) -> bytes:
    """Header (an object, or JSON bytes as they are) and data."""
    packed = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(packed)) + packed + data


def entry(dtype: Any = "F32", shape: Any = (2, 3), offsets: Any = (0, 24)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


# DCP

_META = "torch.distributed.checkpoint.metadata"


def size(*numbers: int) -> bytes:
    return call(glob("torch", "Size"), tup(*map(number, numbers)))


def chunk(offsets: bytes, sizes: bytes) -> bytes:
    return new(glob(_META, "ChunkStorageMetadata"), dct(offsets=offsets, sizes=sizes))


def tensor_meta(shape: bytes, *chunks: bytes, dtype: str = "float32") -> bytes:
    layout = call(glob("torch.serialization", "_get_layout"), text("torch.strided"))
    form = call(glob(_META, "_MEM_FORMAT_ENCODING"), number(0))
    properties = new(
        glob(_META, "TensorProperties"), tup(glob("torch", dtype), layout, b"\x89", form, b"\x89")
    )
    state = dct(properties=properties, size=shape, chunks=lst(*chunks))
    return new(glob(_META, "TensorStorageMetadata"), state)


def bytes_meta() -> bytes:
    return new(glob(_META, "BytesStorageMetadata"))


def index(fqn: bytes, offset: bytes | None = None) -> bytes:
    state = dct(fqn=fqn, index=b"N") if offset is None else dct(fqn=fqn, offset=offset, index=b"N")
    return new(glob(_META, "MetadataIndex"), state)


def where(path: bytes, offset: bytes, length: bytes, **more: bytes) -> bytes:
    return new(
        glob("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        dct(relative_path=path, offset=offset, length=length, **more),
    )


def metadata(
    entries: list[tuple[bytes, bytes]],
    items: list[tuple[bytes, bytes]],
    planner: bytes = b"N",
    **more: bytes,
) -> bytes:
    state = dct(
        state_dict_metadata=pairs(*entries),
        planner_data=planner,
        storage_data=pairs(*items),
        storage_meta=b"N",
        version=text("1.0.0"),
        **more,
    )
    return program(new(glob(_META, "Metadata"), state), 4)


def item(data_pkl: bytes | None = None, storages: dict[str, bytes] | None = None) -> bytes:
    """The archive of one DCP item; of the honest tensor by default."""
    return torch_zip(program(tensor()) if data_pkl is None else data_pkl, storages)


def dcp(folder: Path, data: bytes, meta: bytes, name: str = "__0_0.distcp") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(data)
    (folder / ".metadata").write_bytes(meta)
    return folder


def one_tensor_dcp(
    folder: Path,
    *,
    path: bytes | None = None,
    offset: bytes = number(0),
    length: bytes | None = None,
    shape: bytes | None = None,
    chunks: tuple[bytes, ...] | None = None,
    fqn: bytes = text("w"),
    planner: bytes = b"N",
    file: str = "__0_0.distcp",
    **more: bytes,
) -> Path:
    """A DCP folder with the tensor ``w``, any field of which can be replaced."""
    data = item()
    whole = size(2, 3) if shape is None else shape
    boxes = (chunk(size(0, 0), size(2, 3)),) if chunks is None else chunks
    spot = where(
        text(file) if path is None else path,
        offset,
        number(len(data)) if length is None else length,
        **more,
    )
    meta = metadata([(fqn, tensor_meta(whole, *boxes))], [(index(fqn, size(0, 0)), spot)], planner)
    return dcp(folder, data, meta, file)


def value_dcp(folder: Path, data_pkl: bytes) -> Path:
    """A DCP folder with the tensor ``w`` and a bytes item ``x`` that holds any pickle."""
    value, data = item(data_pkl, {}), item()
    meta = metadata(
        [
            (text("w"), tensor_meta(size(2, 3), chunk(size(0, 0), size(2, 3)))),
            (text("x"), bytes_meta()),
        ],
        [
            (
                index(text("w"), size(0, 0)),
                where(text("__0_0.distcp"), number(len(value)), number(len(data))),
            ),
            (index(text("x")), where(text("__0_0.distcp"), number(0), number(len(value)))),
        ],
    )
    return dcp(folder, value + data, meta)


# DTensor records of torch 2.13

_SPEC = "torch.distributed.tensor._dtensor_spec"
_PLACE = "torch.distributed.tensor.placement_types"


def shard(dim: bytes) -> bytes:
    return new(glob(_PLACE, "Shard"), dct(dim=dim))


def strided(dim: bytes, factor: bytes) -> bytes:
    return new(glob(_PLACE, "_StridedShard"), dct(dim=dim, split_factor=factor))


def replicate() -> bytes:
    return new(glob(_PLACE, "Replicate"), dct())


def flat_layout(shape: bytes, stride: bytes) -> bytes:
    return new(
        glob("torch.distributed._mesh_layout", "_FlatLayout"), dct(shape=shape, stride=stride)
    )


def mesh(axes: bytes, ranks: bytes, *, rank: bytes = number(0), at: bytes | None = None) -> bytes:
    layout = new(glob("torch.distributed._mesh_layout", "_MeshLayout"), dct(axes=axes))
    return new(
        glob("torch.distributed.device_mesh", "DeviceMesh"),
        dct(
            _device_type=text("cpu"),
            _layout=layout,
            _flatten_rank_map=ranks,
            _mesh_dim_names=b"N",
            _rank=rank,
            _coordinate_on_dim=tup(number(0)) if at is None else at,
        ),
    )


def old_mesh(ranks: bytes) -> bytes:
    return new(
        glob("torch.distributed.device_mesh", "DeviceMesh"),
        dct(mesh=ranks, mesh_dim_names=b"N", _coordinate_on_dim=lst(number(0))),
    )


def mesh_1d(world: int, rank: int) -> bytes:
    return mesh(
        tup(flat_layout(number(world), number(1))),
        tup(*map(number, range(world))),
        rank=number(rank),
        at=tup(number(rank)),
    )


def dtensor(
    mesh_: bytes,
    placements: bytes,
    shape: bytes,
    local: bytes | None = None,
    **spec_fields: bytes,
) -> bytes:
    cls = glob("torch.distributed.tensor", "DTensor")
    spec = new(glob(_SPEC, "DTensorSpec"), dct(mesh=mesh_, placements=placements, **spec_fields))
    wrapped = tup(
        cls,
        glob("torch", "float32"),
        shape,
        tup(number(3), number(1)),
        number(0),
        b"N",
        text("cpu"),
        b"\x89",
    )
    state = tup(b"N", dct(_local_tensor=tensor() if local is None else local, _spec=spec))
    return call(
        glob("torch._tensor", "_rebuild_from_type_v2"),
        glob("torch._utils", "_rebuild_wrapper_subclass"),
        cls,
        wrapped,
        state,
    )
