"""What is recorded of a model: in the checkpoint, beside it, and in the folders above.

Records are the config.json of transformers, Meta's params.json, Megatron-LM's arguments, and what
trainers write around a checkpoint: Megatron-Bridge, NeMo 1 and 2, verl, the Trainer of
transformers, torchtitan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from ckptool.core.catalog import Catalog
from ckptool.core.state_category import state_category
from ckptool.errors import CkptoolError, Damaged, Denied, NotFound
from ckptool.serialization.pickle.records import Call
from ckptool.serialization.source import is_there, parse_json_object
from ckptool.storage.file_status import is_file_there
from ckptool.storage.files import Files, unreadable
from ckptool.storage.place import absolute, archive_in, by_place, file_at, on_disk
from ckptool.storage.url import Location, RemotePath

CONFIG = "config.json"
_PARAMS = "params.json"
_AROUND = (
    CONFIG,
    "huggingface/config.json",
    "transformer_config.json",
    "run_config.yaml",
    "context/model.yaml",
    "model_config.yaml",
)
"""Of transformers; verl (0.9, for FSDP and for Megatron-LM); Megatron-Bridge (0.3); NeMo 2, 1."""
_JOB = b'"model_spec"'
"""Keys of a torchtitan (0.3) job config, JSON of any name (``debug.save_config_file``)."""
_MOST_JOBS = 64
_FOLDERS_UP = 2
"""verl (0.9) has the model's shards in ``model/dist_ckpt``, its config two folders above."""
HIDDEN_SIZES = ("hidden_size", "n_embd", "d_model", "dim")
LAYER_COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
"""Keys for the width of the hidden state, and for the number of layers."""
MODEL_TYPES = "model_types"
"""Keys of the ``model_type`` of a whole model, and of that of its ``text_config``."""
DTYPE_KEYS = ("dtype", "torch_dtype")
_OF_OTHERS: tuple[type[Exception], ...] = (CkptoolError, Denied)
"""The errors of files above a checkpoint's folder that are skipped: they may be of anything."""
_NAMESPACES = ("argparse.Namespace", "types.SimpleNamespace")
_DEEPEST = 3
_LARGEST = 1 << 24
_LARGEST_YAML = 1 << 20

Record = Mapping[str, Any]
"""What one file, or one namespace of arguments, records of the model."""


def records(source: Files, catalog: Catalog, assets: Path | None) -> list[Record]:
    """Return what is recorded of the model, the strongest record first.

    The config.json of ``assets``, that beside the checkpoint, Meta's params.json, and the arguments
    that Megatron-LM saves. Raises Damaged or NotFound if one of these files cannot be read.
    """
    asset_records = [_read_file(assets / CONFIG)] if assets is not None else []
    file_records = [read_beside(source, name) for name in (CONFIG, _PARAMS)]
    arguments = (
        namespace
        for entry in catalog.objects.values()
        for namespace in _namespaces(entry.value, _DEEPEST, is_args=str(entry.path[-1]) == "args")
    )
    return [*asset_records, *file_records, *map(_of_megatron, arguments)]


def read_beside(source: Files, name: str) -> Record:
    """Read a JSON file of the checkpoint; empty if there is no such file."""
    return _merge_text_config(object_in(source, name)) if is_there(source, name) else {}


def _read_file(path: Path) -> Record:
    """Read a JSON file; empty if there is none, NotFound if it cannot be read."""
    try:
        if not is_file_there(path):
            return {}
        return _merge_text_config(parse_object(str(path), path.stat().st_size, path.read_bytes))
    except OSError as error:
        raise unreadable(str(path), error) from None


def _merge_text_config(content: dict[str, Any]) -> Record:
    """Return a config with its ``text_config`` merged into it.

    Its own ``dtype`` stays, and both model types do. Keys of ``vision_config`` become
    ``vision_config.NAME``.
    """
    inner, vision = content.get("text_config"), content.get("vision_config")
    if isinstance(vision, dict):
        content |= {f"vision_config.{name}": value for name, value in vision.items()}
    if not isinstance(inner, dict):
        return content
    kinds = [part["model_type"] for part in (content, inner) if part.get("model_type")]
    dtypes = {key: content[key] for key in DTYPE_KEYS if content.get(key)}
    return {**content, **inner, **dtypes, MODEL_TYPES: kinds}


def object_in(source: Files, name: str) -> dict[str, Any]:
    """Read an object of JSON or YAML, a file of a source. Raises as ``parse_object`` does."""
    nbytes = source.files[name]
    return parse_object(name, nbytes, lambda: source.read(name, 0, nbytes))


def parse_object(path: str, nbytes: int, read: Callable[[], bytes]) -> dict[str, Any]:
    """Parse an object of JSON or YAML; Damaged if it is none, or too large for one."""
    is_yaml = path.endswith(".yaml")
    most = _LARGEST_YAML if is_yaml else _LARGEST
    if nbytes > most:
        raise Damaged(f"{path}: larger than {most:,} bytes, not a configuration file")
    if not is_yaml:
        return parse_json_object(read(), path)
    try:
        content = _load_yaml(read())
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{path}: cannot be read as YAML: {error}") from None
    if not isinstance(content, dict):
        raise Damaged(f"{path}: not a YAML object")
    return content


def _load_yaml(data: bytes) -> Any:
    """Return the contents of YAML; objects tagged as Python's become the plain data in them.

    Raises ValueError.
    """
    import yaml

    class PlainLoader(yaml.SafeLoader):
        """Makes dicts, lists and text of whatever is tagged.

        ``<<`` is an ordinary key: merging could double the content with every line.
        """

        def flatten_mapping(self, node: Any) -> None:
            pass

    def construct(loader: Any, tag: str, node: Any) -> Any:
        if isinstance(node, yaml.MappingNode):
            return loader.construct_mapping(node, deep=True)
        if isinstance(node, yaml.SequenceNode):
            return loader.construct_sequence(node, deep=True)
        return loader.construct_scalar(node)

    PlainLoader.add_multi_constructor("", construct)
    try:
        return yaml.load(data, PlainLoader)  # a SafeLoader: nothing is executed
    except yaml.YAMLError as error:
        raise ValueError(str(error).partition("\n")[0]) from None
    except (LookupError, AttributeError) as error:  # PyYAML 6.0 of what is tagged, but no number
        raise ValueError(f"a value is not of its tag's type: {error}") from None


def _namespaces(value: Any, depth: int, *, is_args: bool) -> Iterator[Record]:
    """Yield every ``args`` namespace in a value, which may be one itself."""
    if is_args and isinstance(value, Call) and value.name in _NAMESPACES:
        yield {k: v for k, v in value.fields.items() if isinstance(k, str)}
    elif depth and isinstance(value, list | tuple):
        for item in value[:4]:
            yield from _namespaces(item, depth - 1, is_args=False)
    elif depth and isinstance(value, dict):
        yield from _namespaces(value.get("args"), depth - 1, is_args=True)


def arguments_in(catalog: Catalog) -> Record:
    """Return the arguments of Megatron-LM among a checkpoint's values; empty if there are none."""
    entry = catalog.objects.get("args")
    namespaces = () if entry is None else _namespaces(entry.value, 0, is_args=True)
    return next(iter(namespaces), {})


def _of_megatron(arguments: Record) -> Record:
    """Add the names that others use to the arguments of Megatron-LM or Megatron-core.

    Core 0.7 to 0.20.
    """
    record = dict(arguments)
    if record.get("group_query_attention") is False:
        record["num_query_groups"] = record.get("num_attention_heads")
    untied = record.get("untie_embeddings_and_output_weights")
    tied = record.get("share_embeddings_and_output_weights")  # as its configurations say it
    if isinstance(untied, bool):
        record["tie_word_embeddings"] = not untied
    elif isinstance(tied, bool):
        record["tie_word_embeddings"] = tied
    norm = str(record.get("normalization")).lower()  # layernorm1p in NeMo 1
    if record.get("layernorm_zero_centered_gamma") is True or norm == "layernorm1p":
        record["apply_layernorm_1p"] = True
    return record


def records_model(candidates: Iterable[Record]) -> bool:
    """Return whether one of the records states the size of the model."""
    return any(map(_find_model, candidates))


def records_around(path: Location, catalog: Catalog) -> dict[str, Record]:
    """Return what files around a checkpoint record of its model, by file.

    In its folder and the two above, nearest first. Skips those that describe tensors of other
    sizes, that are no configuration, and files above that cannot be read. Raises NotFound for one
    in its folder that cannot be read, Damaged for a config.json there that is none.
    """
    records_by_file: dict[str, Record] = {}
    for place, read in _files_around(path):
        record = _of_trainer(read())
        if record and _describes(record, catalog):
            records_by_file[place] = record
    return records_by_file


def _files_around(path: Location) -> Iterator[tuple[str, Callable[[], Record]]]:
    """Yield the places where trainers put configurations, and the reader of each.

    Those of a ``.nemo`` archive are inside it; torchtitan's are searched for on a disk.
    """
    is_folder = path.is_dir()
    archive = None if is_folder else archive_in(file_at(path), path)
    if archive is not None:
        for name in _AROUND:
            yield f"{archive.root}/{name}", partial(read_beside, archive, name)
    home, *_ = folders = _folders_around(path)
    for folder in folders:
        for name in _AROUND:
            if not (is_folder and folder == home and name == CONFIG):  # a file of the checkpoint
                own_errors = () if name == CONFIG else (Damaged,)
                skipped = own_errors if folder == home else _OF_OTHERS
                yield str(folder / name), partial(_read_unless, skipped, folder / name)
        if (disk := on_disk(folder)) is not None:
            for job in islice(sorted(disk.glob("*.json")), _MOST_JOBS):
                yield str(job), partial(_read_job, job)


def read_nearest(path: Location, names: Sequence[str]) -> tuple[str, Record]:
    """Return the place and content of the nearest JSON file of one of these names, or nothing.

    In a checkpoint's folder, or up to two above, where those that cannot be read are skipped.
    Raises Damaged or NotFound for one in its folder.
    """
    home, *_ = folders = _folders_around(path)
    for folder in folders:
        skipped = () if folder == home else _OF_OTHERS
        for name in names:
            if record := _read_unless(skipped, folder / name):
                return str(folder / name), record
    return "", {}


def _folders_around(path: Location) -> list[Location]:
    """Return a checkpoint's folder and those above that may belong to it, nearest first."""
    home = absolute(path if path.is_dir() else path.parent)
    return [home, *home.parents[:_FOLDERS_UP]]


def _of_trainer(content: Record) -> Record:
    """Return what a trainer's configuration says of the model; empty if that is nothing."""
    job = content.get("model_spec")
    if isinstance(job, Mapping) and isinstance(job.get("model"), Mapping):
        return _of_torchtitan(job["model"])
    return _of_megatron(_find_model(content) or {})


def _of_torchtitan(model: Record) -> Record:
    """Return what torchtitan (0.3) records of a model, under transformers' names.

    Layers are a list there: keys that differ among them are omitted.
    """
    layers = model.get("layers")
    layers = layers if isinstance(layers, list) else []
    parts = [layer.get("attention") for layer in layers if isinstance(layer, Mapping)]
    attention = [part for part in parts if isinstance(part, Mapping)]
    heads = [part.get("n_heads") for part in attention]
    kv = [part.get("n_kv_heads") or part.get("n_heads") for part in attention]
    return {
        "hidden_size": model.get("dim"),
        "num_hidden_layers": len(layers) or None,
        "num_attention_heads": heads[0] if heads and heads == heads[:1] * len(heads) else None,
        "num_key_value_heads": kv[0] if kv and kv == kv[:1] * len(kv) else None,
        "vocab_size": model.get("vocab_size"),
        "tie_word_embeddings": model.get("enable_weight_tying"),
    }


def _read_job(path: Path) -> Record:
    """Read a job config of torchtitan; empty if the file is another, or cannot be read."""
    with suppress(CkptoolError, OSError):
        if path.is_file() and path.stat().st_size <= _LARGEST and _JOB in path.read_bytes():
            return _read_file(path)
    return {}


def read_file(path: Location) -> Record:
    """Read a JSON file of a disk or a store; empty if there is none."""
    return by_place(path, _read_file, _read_stored)


def _read_stored(path: RemotePath) -> Record:
    try:
        data = path.read_bytes()
    except NotFound:
        return {}
    return _merge_text_config(parse_object(str(path), len(data), lambda: data))


def _read_unless(skipped: tuple[type[Exception], ...], path: Location) -> Record:
    """Read a file; empty if there is none, or for some errors."""
    with suppress(*skipped):
        return read_file(path)
    return {}


def _find_model(record: Record) -> Record | None:
    """Return the outermost part of a configuration that states the size of the model.

    With the plain values around it: Megatron-core's ``GPTModelConfig`` (0.20) has the vocabulary
    there, and its ``transformer`` the rest. YAML aliases may repeat a part: each is visited once.
    """
    parts: list[tuple[Record, Record]] = [(record, {})]
    ids = {id(record)}
    for _ in range(_DEEPEST + 1):
        for part, parent in parts:
            if any(name in part for name in HIDDEN_SIZES) and any(
                name in part for name in LAYER_COUNTS
            ):
                around = {n: v for n, v in parent.items() if not isinstance(v, Mapping | list)}
                return {**around, **part}
        inner = {
            id(value): (value, part)
            for part, _ in parts
            for value in part.values()
            if isinstance(value, Mapping) and id(value) not in ids
        }
        parts = list(inner.values())
        ids.update(inner)
    return None


def is_causal(config: Record) -> bool:
    """Return whether a config of transformers is that of a model with a head for texts."""
    names = config.get("architectures")
    return isinstance(names, list) and any(str(name).endswith("ForCausalLM") for name in names)


def _describes(record: Record, catalog: Catalog) -> bool:
    """Return whether most of the model's matrices have a dim of the recorded size."""
    hidden = next((record[name] for name in HIDDEN_SIZES if type(record.get(name)) is int), None)
    shapes = [
        entry.shape
        for entry in catalog.tensors.values()
        if len(entry.shape) > 1 and state_category(entry) == "model"
    ]
    return hidden is not None and 2 * sum(hidden in shape for shape in shapes) >= len(shapes) > 0
