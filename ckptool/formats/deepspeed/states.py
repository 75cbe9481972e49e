"""The dicts in DeepSpeed's files: their tensors, the layout of these, and other values."""

from __future__ import annotations

from collections.abc import Mapping
from functools import wraps
from typing import Any

from msgspec import Struct

from ckptool.core.catalog import Catalog, Path, flat_name
from ckptool.errors import Damaged, Refusal, SourceError, naming, refused
from ckptool.formats.base import ScanOptions
from ckptool.formats.companions import Scan
from ckptool.serialization.archive.read import TorchFile, read_torch_file
from ckptool.serialization.archive.tensors import (
    describe,
    locate_tensor,
    read_natural,
    read_sizes,
    read_tensor,
)
from ckptool.serialization.pickle.load import require_harmless
from ckptool.serialization.pickle.records import Call
from ckptool.serialization.source import Source
from ckptool.serialization.state_dict.leaves import (
    Barred,
    Leaf,
    PlainLeaf,
    find_refusal,
    read_leaves,
    replace_refused,
    require_readable,
)

_LAYOUT = frozenset(
    "module optimizer param_shapes frozen_param_shapes frozen_param_fragments buffer_names"
    " shared_params".split()
)
_PARTITIONS = frozenset(
    "base_optimizer_state optimizer_state_dict single_partition_of_fp32_groups fp32_flat_groups"
    " fp32_groups fp32_groups_flat group_paddings param_alignment_paddings partition_count"
    " param_slice_mappings state param_groups".split()
)
CLIENT = "client_state"
_OPTIMIZERS = ("optimizer", "optimizer_state_dict")
_WRAPPERS = ("base_optimizer_state", "optimizer_state_dict")
"""The keys under which DeepSpeed keeps torch's own optimizer."""
_NAMING = ("params", "name", "moe")
_ENGINE = frozenset(
    "lr_scheduler data_sampler random_ltd skipped_steps global_steps global_samples dp_world_size"
    " mp_world_size checkpoint_parallel_dimensions ds_config ds_version num_experts"
    " ds_autoep_layers csr_tensor_module_names sparse_tensor_module_names"
    " universal_checkpoint_info".split()
)
_LOSS_SCALERS = "deepspeed.runtime.fp16.loss_scaler."
_ENUMS = "deepspeed.runtime.zero.config."


class State(Struct, frozen=True):
    """The dict of a torch.save file, with access that raises Damaged and names the file.

    ``stored`` is the dict as it is, ``readable`` the same with a ``Refusal`` in place of each part
    that cannot or must not be read, or one for all of it; ``refused`` are those of the whole file
    by path. Whatever needs a refused part raises Barred.
    """

    file: TorchFile
    stored: Mapping[Any, Any]
    readable: Mapping[Any, Any] | Refusal
    refused: Mapping[Path, Refusal]

    @property
    def fields(self) -> Mapping[Any, Any]:
        """The items of the dict, including refusals; Barred if all of it is refused."""
        if isinstance(self.readable, Refusal):
            raise Barred(self.readable)
        return self.readable

    def get(self, key: str, default: Any = None) -> Any:
        """Return what lies under a key; Barred where a part of it is refused."""
        value = self.fields.get(key, default)
        return require_readable(value) if self.refused else value

    def mapping(self, key: str) -> Mapping[Any, Any]:
        """Return a dict, or an empty one where the key is absent or None."""
        value = self.get(key)
        if value is None:
            return {}
        return dict(self._require(value, dict, key))

    def sequence(self, key: str) -> list[Any]:
        """Return a list; Damaged if there is none."""
        return list(self._require(self.get(key), list | tuple, key))

    def count(self, key: str, default: int = 1) -> int:
        """Return a positive int, or the default where the key is absent."""
        value = self.get(key, default)
        with naming(self.file.what):
            return read_natural(self._require(value, int, key)) or default

    def inner(self, key: str) -> State:
        """Return the state of a nested dict, of which parts, or all, may be refused."""
        if isinstance(self.readable, Refusal):
            return self
        value = self.readable.get(key)
        if value is not None and not isinstance(value, Refusal):
            value = self._require(value, dict, key)
        stored = self.stored.get(key)
        content = stored if isinstance(stored, dict) else {}
        return State(self.file, content, {} if value is None else value, self.refused)

    def names(self, key: str) -> list[str]:
        """Return a list of texts, empty if the key is absent or None."""
        value = self.get(key) or []
        return [text for text in self._require(value, list | tuple, key) if isinstance(text, str)]

    def groups(self) -> list[dict[str, Any]]:
        """Return the names and order of parameters in the ``param_groups`` of this state, if any.

        Raises Barred if some of that is refused; the other items of a group are ignored.
        """
        groups = require_shallow(self.fields.get("param_groups")) or []
        records = [require_shallow(group) for group in groups]
        return [{k: require_readable(v) for k, v in g.items() if k in _NAMING} for g in records]

    def vector(self, value: Any) -> PlainLeaf | None:
        """Return the tensor that a value is, or None."""
        tensor = read_tensor(value)
        return None if tensor is None else PlainLeaf(locate_tensor(tensor, self.file), tensor)

    @property
    def tensors(self) -> dict[str, PlainLeaf]:
        """The plain tensors of the dict by their names, without what is refused."""
        vectors = {str(name): self.vector(value) for name, value in self.fields.items()}
        return {name: vector for name, vector in vectors.items() if vector is not None}

    @property
    def refusals(self) -> dict[str, Refusal]:
        """Why entries of the dict are refused, by name."""
        reasons = {str(k): find_refusal(v) for k, v in self.fields.items()} if self.refused else {}
        return {name: why for name, why in reasons.items() if why is not None}

    @property
    def values(self) -> dict[Any, Any]:
        """What is not a plain tensor by its name, except what is refused."""
        refused = self.refusals
        values = ((n, v) for n, v in self.fields.items() if read_tensor(v) is None)
        return {name: value for name, value in values if str(name) not in refused}

    def _require(self, value: Any, kind: Any, key: str) -> Any:
        if isinstance(value, kind):
            return value
        raise Damaged(f"{self.file.what}: {key} is {describe(value)}", "metadata-unreadable")


def refuse_malformed(scan: Scan) -> Scan:
    """Make a scan raise Damaged if a state is unlike any that DeepSpeed writes.

    If everything depends on a refused part, that is raised: Hostile or Damaged.
    """

    @wraps(scan)
    def checked(source: Source, options: ScanOptions) -> Catalog:
        try:
            return scan(source, options)
        except Barred as error:
            raise refused([error.refusal], subject=source.root) from None
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            message = f"{source.root}: not a state that DeepSpeed writes: {error}"
            raise Damaged(message, "metadata-unreadable") from None

    return checked


def read_state(source: Source, file: str) -> State:
    """Return the dict of a torch.save file, with refusals in place of unreadable parts.

    Raises Damaged if it is something else, Hostile for code outside these parts.
    """
    opened = read_torch_file(source, file)
    if not isinstance(opened.inert, dict):
        raise Damaged(
            f"{file}: holds {describe(opened.inert)}, expected a dict",
            "file-type-mismatch",
        )
    readable, reasons = replace_refused(opened, source)
    require_harmless(opened.narrowed(readable).hostile)
    for path, why in reasons.items():
        why.part = "optimizer" if path[0] in _OPTIMIZERS else None
    return State(opened, opened.inert, readable, reasons)


def read_optimizer(source: Source, file: str) -> State:
    """Return the dict in a file of optimizer states, all of it refused if it cannot be read."""
    try:
        return read_state(source, file)
    except SourceError as error:
        why = make_refusal(error, "optimizer", "optimizer")
        opened = TorchFile(file, {}, {}, "little", 0)
        return State(opened, {}, why, {(): why})


def make_refusal(error: SourceError, name: str, part: str | None) -> Refusal:
    """Return why the entry of that name and part cannot be read."""
    problem = error.message
    why = Refusal(f"{name}: {problem}", problem.code, file=problem.file, tensor=name)
    why.part = part
    return why


def require_shallow(value: Any) -> Any:
    """Return the value; raise Barred if it is refused itself, though not if parts of it are."""
    if isinstance(value, Refusal):
        raise Barred(value)
    return value


def require_shallow_dict(value: Any) -> Mapping[Any, Any]:
    """Return a dict, or an empty one for anything else; Barred if it is refused itself."""
    return dict_or_empty(require_shallow(value))


def read_shape_groups(state: State) -> list[dict[str, tuple[int, ...]]]:
    """Return parameter shapes by name, one dict per group, in the order of the flat buffers.

    DeepSpeed before 0.5.4 wrote one dict for the only group.
    """
    key = "param_shapes"
    value = state.get(key) or []
    groups = [value] if isinstance(value, dict) else state.sequence(key) if value else []
    shapes = []
    for group in groups:
        if not isinstance(group, dict):
            raise Damaged(
                f"{state.file.what}: {key} holds {describe(group)}", "metadata-unreadable"
            )
        with naming(state.file.what):
            shapes.append({str(name): read_sizes(shape) for name, shape in group.items()})
    return shapes


def read_trained_shapes(state: State) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all parameters in the optimizer's groups; empty without ZeRO."""
    return {name: shape for group in read_shape_groups(state) for name, shape in group.items()}


def require_all_tensors(*states: State, values: bool = False) -> None:
    """Raise Barred if an entry of the states that may be a tensor is refused.

    With ``values``, also if it is not one now: another name could take its place.
    """
    for state in states:
        for why in state.refusals.values():
            if values or why.may_be_tensor:
                raise Barred(why)


# Values


def read_engine_leaves(state: State, source: Source) -> dict[str, Leaf]:
    """Return the values of a model file. Keys unknown to DeepSpeed are the script's own."""
    values: dict[Any, Any] = {}
    client: dict[Any, Any] = {}
    for key, value in state.stored.items():
        if key not in _LAYOUT:
            (values if key in _ENGINE else client)[key] = value
    if client:
        values[CLIENT] = client
    return read_leaves(state.file.narrowed(values), source)


def list_refused_leaves(
    state: State, prefix: Path = (), kinds: Mapping[str, str] | None = None
) -> dict[str, Leaf]:
    """Return the refusals among a file's tensors and their layout, each part by its name.

    Without a ``prefix`` that is a model file's; ``kinds`` say which names in its module are those
    of a ``buffer`` or of a ``frozen`` parameter. Other values are in ``read_engine_leaves`` and
    ``read_optimizer_leaves``, which refuse theirs.
    """
    leaves: dict[str, Leaf] = {}
    for path, why in state.refused.items():
        is_value = path[:1] == ("optimizer_state_dict",) and {*path[1:2]} - _PARTITIONS
        if is_value or not (prefix or path[0] in _LAYOUT):
            continue
        inner = path[1:] if path[:1] == prefix else path
        full = (*prefix, *(step for step in inner if step not in _WRAPPERS))
        if kinds and path[0] == "module":
            full = (kinds[str(path[1])], *path[1:])
        leaves[flat_name(full)] = Leaf(full, why.called(flat_name(full)), bool(why.part))
    return leaves


def read_optimizer_leaves(optimizer: State, source: Source) -> dict[str, Leaf]:
    """Return the optimizer's values that belong to no parameter: its groups, the loss scale."""
    values = {key: _unwrap(v) for key, v in optimizer.stored.items() if key not in _PARTITIONS}
    groups = find_param_groups(optimizer.stored)
    if groups:
        values["param_groups"] = groups
    if not values:
        return {}
    file = optimizer.file.narrowed(values)
    return read_leaves(file, source, prefix=("optimizer",))


def read_raw_leaves(optimizer: State, source: Source) -> dict[str, Leaf]:
    """Return an optimizer's state dict unchanged, for each rank."""
    file = optimizer.file.narrowed(dict(optimizer.stored))
    return read_leaves(file, source, prefix=("optimizer",), rank_state=True)


def find_param_groups(optimizer: Any) -> Any:
    """Return torch's param_groups as stored, wherever the kind of optimizer keeps them."""
    stored = dict_or_empty(optimizer)
    for key in _WRAPPERS:
        inner = stored.get(key)
        if isinstance(inner, dict):
            return inner.get("param_groups")
    return stored.get("param_groups")


def _unwrap(value: Any) -> Any:
    """Return a loss scaler as a dict of its attributes, an enum's member as its value."""
    if isinstance(value, Call) and value.name.startswith(_LOSS_SCALERS):
        return dict(value.fields)
    if isinstance(value, Call) and value.name.startswith(_ENUMS) and len(value.args) == 1:
        return value.args[0]
    return value


def find_zero_stage(model: State, optimizer: State | None) -> int | None:
    """Return the stage of ZeRO; None if it is odd. Raises Barred if only a refused part has it."""
    stage = _unwrap(optimizer.stored.get("zero_stage")) if optimizer else None
    if isinstance(stage, int):
        return stage
    config = require_shallow_dict(model.fields.get("ds_config"))
    zero = require_shallow_dict(config.get("zero_optimization"))
    stage = require_shallow(zero.get("stage", 0))
    return stage if isinstance(stage, int) else None


def dict_or_empty(value: Any) -> Mapping[Any, Any]:
    """Return a value that is a dict, or an empty one."""
    return value if isinstance(value, dict) else {}
