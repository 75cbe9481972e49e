"""The models of a step: which lie inside its checkpoints, and what each lost since the first."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from typing import Any, NamedTuple

from msgspec.structs import replace

from ckptool.commands.detect import find_checkpoints
from ckptool.commands.open import Survey, survey_readable
from ckptool.commands.options.read import ReadOptions
from ckptool.commands.runs.names import parse_name
from ckptool.commands.runs.steps import Step
from ckptool.commands.runs.trainers import UNFINISHED, is_spared
from ckptool.commands.verify.checks.optimizer_names import StateName
from ckptool.core.catalog import Catalog
from ckptool.core.state_category import AVERAGE, state_category, weights
from ckptool.core.text import list_some
from ckptool.errors import CkptoolError, Problem
from ckptool.serialization.file_roles import is_of_training, role_of
from ckptool.storage.place import has_any, on_disk
from ckptool.storage.url import Location, within

StepSurvey = tuple[bool, Survey]
"""Whether a checkpoint lies inside another of its step, and its survey."""
Look = Callable[[Location, bool], Survey | None]
"""Surveys a checkpoint at a place, inside another or not."""
Matrices = Mapping[str, tuple[int, ...]]
"""The shapes of a model's matrices, by name: of buffers, versions of a library save others."""

_LOADED = ".safetensors"
"""How files end that hold nothing but tensors: torch saves other values, too."""
_OF_A_LAYER = re.compile(r"(.+[./])?(weight|kernel)")
_OF_A_MODEL = re.compile(r"(?i).*(model|weights)\.[a-z]+")
"""Names of a model's matrix and file. Others may be samples, results of an evaluation, or a buffer
of experience, in which numbers that are none say nothing."""
_DATA = 64
"""More files of tensors than this lie in a folder of samples."""
_PART, _SHOWN = 4, 2
"""The share of a model, one in so many, of which more is not lost but left out."""
_NUMBER = re.compile(r"\d")
_PASSING = re.compile(r"_|.*step")


def walk_models(step: Step, look: Look) -> Iterator[StepSurvey]:
    """Yield the surveys of a step's checkpoints, then of the models inside them, at any depth.

    Raises NoAnswer, and what ``look`` raises.
    """
    places, inside = list(step.parts), False
    while places:
        surveys = [survey for place in places if (survey := look(place, inside)) is not None]
        yield from ((inside, survey) for survey in surveys)
        places = [place for survey in surveys for place in _models_inside(survey, step)]
        inside = True


def survey_models(step: Step, options: ReadOptions) -> Iterator[StepSurvey]:
    """Yield what is readable of a step's checkpoints and the models inside. Raises NoAnswer."""
    return walk_models(step, lambda at, inside: survey_readable(at, as_read(options, inside)))


def as_read(options: ReadOptions, inside: bool) -> ReadOptions:
    """Return how a checkpoint of a step is read: inside another, in its own format."""
    return replace(options, from_format=None) if inside else options


def _models_inside(survey: Survey, step: Step) -> Iterator[Location]:
    """Yield the models in a checkpoint's folder that are saved with it, but not read with it.

    As diffusers' scripts save ``unet/`` and ``unet_ema/`` in accelerate's folder, and
    sentence-transformers ``2_Dense/`` in the encoder's. Raises NoAnswer.
    """
    head, catalog = survey.path, survey.catalog
    if catalog is None or not head.is_dir():
        return
    files = [head / name for name in (*catalog.files, *catalog.copies)]
    members = {*files, *(folder for file in files for folder in file.parents), *step.parts}
    members.update(head / name for name in catalog.companions)  # a model may lie beside one
    inner = [place for place in find_checkpoints(head, survey.source)[1] if place not in members]
    counts = Counter(place.parent for place in inner)
    for place in inner:
        names = within(place, head).parts
        if counts[place.parent] > _DATA or not all(map(_may_be_saved, names)):
            continue
        if not _is_linked(place, head) and _is_model(place, names):
            yield place


def _is_linked(place: Location, head: Location) -> bool:
    """Return whether a link in a checkpoint's folder leads to a folder, as that of a base model."""
    ways = (on_disk(path) for path in (place, *place.parents) if head in path.parents)
    return any(way is not None and way.is_symlink() and way.is_dir() for way in ways)


def _may_be_saved(name: str) -> bool:
    """Return whether a name is not that of a copy, a leftover, another step or training state."""
    is_other = name.startswith(".") or name.isdecimal() or is_of_training(name)
    is_other = is_other or is_spared(name) or re.fullmatch(UNFINISHED, name) is not None
    return not (is_other or parse_name(name, is_folder=True).position)


def _is_model(place: Location, names: Sequence[str]) -> bool:
    """Return whether a place has a model, or by its names had one before it was damaged."""
    is_named = any(role_of(name) == "model" for name in names)
    if not (is_named or place.is_dir() or place.name.endswith(_LOADED)) or _is_of_openvino(place):
        return False
    survey = survey_readable(place)
    if survey is not None and survey.path != place:
        return False
    files = survey.source.files if survey is not None and place.is_dir() else (place.name,)
    if survey is None or survey.catalog is None or survey.problems:
        is_loaded = place.name.endswith(_LOADED)
        return is_named or is_loaded or any(role_of(name) == "model" for name in files)
    matrices = matrices_in(survey.catalog)
    is_model_file = any(map(_OF_A_MODEL.fullmatch, files))
    return bool(matrices) and (is_model_file or any(map(_OF_A_LAYER.fullmatch, matrices)))


def _is_of_openvino(place: Location) -> bool:
    """Return whether a file has the weights of OpenVINO, whose graph lies beside them."""
    return place.name.endswith(".bin") and has_any(place.parent, [f"{place.stem}.xml"])


class Models:
    """Compares each step's models with those of the first one before it, by names and shapes."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._first: dict[Location, Mapping[str, _Model]] = {}

    def lost(
        self, step: Step, surveys: Iterable[StepSurvey], earlier: Sequence[Step]
    ) -> Iterator[Problem]:
        """Yield what a step's models lost since the first of the ``earlier`` steps with models.

        Nothing of other models. Raises NoAnswer.
        """
        if not earlier:
            return
        if earlier[0].path not in self._first:
            self._first[earlier[0].path] = self._find_first(earlier)
        firsts, models = self._first[earlier[0].path], _models_of(step, surveys)
        gains = {n for place, model in models.items() for n in model.new_since(firsts.get(place))}
        for place, model in models.items():
            first = firsts.get(place)
            if first is None or model.is_another_than(first):
                continue
            if names := [name for name in model.lost_since(first) if name not in gains]:
                where = f"{place}: " if place else ""
                message = f"{where}{list_some(names, _SHOWN)}: missing, {first.step} has it"
                yield Problem(message, "like-missing")

    def _find_first(self, steps: Iterable[Step]) -> Mapping[str, _Model]:
        for step in steps:
            models = _models_of(step, survey_models(step, self._options))
            if any(model.matrices for model in models.values()):
                return models
        return {}


class _Model(NamedTuple):
    """The tensors that a step has, the model's matrices, and the configs beside them.

    ``weights`` are how many tensors it has. ``state`` is how many tensors of optimizers the step
    has, which are of so many ``trained`` parameters.
    """

    step: str
    names: Set[str]
    matrices: Matrices
    configs: Sequence[Mapping[str, Any]]
    weights: int
    state: int
    trained: int

    def is_another_than(self, first: _Model) -> bool:
        """Return whether it is a model of its own: of other config, names, shapes, or much less.

        It is not if it has fewer tensors than the first one's optimizer, as before, trains.
        """
        first_shapes, shapes = first.matrices, self.matrices
        differs = bool(self.configs and first.configs) and self.configs != first.configs
        lacks_some = self.weights < self.trained <= first.weights and self.state == first.state
        is_less = _PART * len(first_shapes.keys() - shapes.keys()) > len(first_shapes)
        return (
            differs
            or any(first_shapes.get(name) != shape for name, shape in shapes.items())
            or (is_less and not lacks_some)
        )

    def new_since(self, first: _Model | None) -> Set[str]:
        """Return the matrices that the first model lacks: shards may have others in later steps."""
        return self.matrices.keys() - (first.matrices.keys() if first is not None else set())

    def lost_since(self, first: _Model) -> list[str]:
        """Return the first model's matrices that are not in this one.

        Not those that are here in another type, those that no layer has any longer, such as masks,
        nor those that may have been tied since, such as a head, unless an optimizer has as much
        state as before, and so as many parameters.
        """
        from ckptool.core.keymap.model import abstract

        first_shapes, missing = first.matrices, first.matrices.keys() - self.matrices.keys()
        if not missing.isdisjoint(self.names):
            return []
        kind = {name: abstract(name)[0] for name in first_shapes}
        first_kinds, kinds = Counter(kind.values()), {kind[name] for name in self.matrices}
        may_be_tied = self.state != first.state or not self.state
        shapes = {shape for name, shape in self.matrices.items() if not _NUMBER.search(name)}
        return sorted(
            name
            for name in missing
            if (first_kinds[kind[name]] == 1 or kind[name] in kinds)
            and (_NUMBER.search(name) or first_shapes[name] not in shapes or not may_be_tied)
        )


def _models_of(step: Step, surveys: Iterable[StepSurvey]) -> Mapping[str, _Model]:
    """Return the models of a step, by their places: all side by side as one, and each file's."""
    groups: dict[str, list[Survey]] = {}
    state: list[str] = []
    for inside, survey in surveys:
        tensors = survey.catalog.tensors.values() if survey.catalog is not None else ()
        state += [entry.name for entry in tensors if state_category(entry) == "optimizer"]
        groups.setdefault(_place_in(step, survey.path, inside), []).append(survey)
        if not inside and not survey.path.is_dir():
            groups.setdefault(_file_in(step, survey.path), []).append(survey)
    models: dict[str, _Model] = {}
    trained = len({StateName.of(name)[:2] for name in state})
    for place, group in groups.items():
        catalogs = [survey.catalog for survey in group if survey.catalog is not None]
        names = {name for catalog in catalogs for name in catalog.tensors}
        matrices = {n: shape for c in catalogs for n, shape in matrices_in(c).items()}
        configs = [*filter(None, map(_config_beside, group))]
        count = sum(len(weights(catalog)) for catalog in catalogs)
        sizes = count, len(state), trained
        models[place] = _Model(step.path.name, names, matrices, configs, *sizes)
    return models


def _place_in(step: Step, path: Location, inside: bool) -> str:
    """Return a model's path in its step, as other steps have it; nothing for the step's own.

    Files side by side are one model, but for averages, and so are the folders of ranks.
    """
    if path in step.beside and AVERAGE.search(path.name):
        return parse_name(path.name, is_folder=False).kind
    folder = path if inside or path.is_dir() else path.parent
    entry = next((entry for entry in step.entries if entry in folder.parents), None)
    parts = within(folder, entry).parts if entry is not None else ()
    names = {part: parse_name(part, is_folder=True) for part in parts}
    if not inside and any(name.has_rank for name in names.values()):
        return ""
    return "/".join(name.kind if name.position else part for part, name in names.items())


def _file_in(step: Step, path: Location) -> str:
    """Return the path of a file in its step, as other steps have it."""
    entry = next((entry for entry in step.entries if entry in path.parents), path.parent)
    parts = within(path, entry).parts
    names = {part: parse_name(part, is_folder=False) for part in parts}
    is_of_step = {part: step.number in (n.position.number, n.bare) for part, n in names.items()}
    return "/".join(names[part].kind if is_of_step[part] else part for part in parts)


def matrices_in(catalog: Catalog) -> Matrices:
    """Return the matrices of floats of a checkpoint's model."""
    from ckptool.commands.verify.checks.meaning.stacks import is_matrix

    entries = ((name, catalog.tensors.get(name)) for name in weights(catalog))
    return {
        name: entry.shape
        for name, entry in entries
        if entry and entry.source_dtype.kind == "float" and is_matrix(entry.shape)
    }


def _config_beside(survey: Survey) -> Mapping[str, Any]:
    """Return the config of a model, but for what transformers calls private, and counted steps.

    Diffusers' EMAModel counts them in the config of its average (0.42).
    """
    from ckptool.commands.model.records import CONFIG, object_in

    if CONFIG not in survey.source.files:
        return {}
    with suppress(CkptoolError):  # said by its own check
        config = object_in(survey.source, CONFIG)
        return {key: value for key, value in config.items() if not _PASSING.match(key)}
    return {}
