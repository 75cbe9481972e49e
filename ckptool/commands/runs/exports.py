"""Steps of a run that are good, and that training does not go on from: what lies beside those."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from ckptool.commands.runs.contents import AT_ONCE, save_time
from ckptool.commands.runs.names import is_part_folder
from ckptool.commands.runs.records import Contents
from ckptool.commands.runs.steps import Run, Step
from ckptool.commands.runs.trainers import EXPORTS, is_spared
from ckptool.serialization.file_roles import may_be_empty, role_of, without_words
from ckptool.storage.url import Location, within

_COPY = r"(?i)(?<![a-z])(?:hf|hugging[-_]?face|export(?:s|ed)?|merged|converted)(?![a-z])"
"""What a name says of a model that is written for use, not to go on from."""
_AVERAGED = r"(?i)(?<![a-z])(?:ave|avg|averaged?|ema|swa)(?![a-z])"
"""The same of one that is made of steps, maybe long after the last: by more words than ``AVERAGE``,
which is what trainings keep beside their weights."""
_NEWEST = 3
"""How many steps of a series are looked at, since the newest may be damaged."""


def is_export(step: Step, run: Location) -> bool:
    """Return whether a step lies where trainers put what training does not go on from."""
    return any(re.fullmatch(EXPORTS, name) is not None for name in within(step.path, run).parts)


class Exports:
    """Tells which steps training does not go on from, by what each has: ``contents_of``."""

    def __init__(self, run: Run, contents_of: Callable[[Step], Contents]) -> None:
        self._run = run
        self._contents_of = contents_of
        self._never_resumed: dict[object, bool] = {}

    def are_all(self) -> bool:
        """Return whether every step of the run lies where exports do."""
        return all(is_export(step, self._run.path) for step in self._run.steps)

    def has(self, step: Step) -> bool:
        """Return whether a step is an export: a model or state alone, beside what has both.

        Raises NoAnswer.
        """
        if len(self._run.by_series) == 1:
            return False
        tests = self.is_state_beside, self._is_state_of_each, self._is_model_beside
        return any(test(step) for test in tests)

    def is_last(self, step: Step) -> bool:
        """Return whether a model alone is the last of whole steps: torchtitan saves it so."""
        series = [other for other in self._run.by_series[step.series] if other.parts]
        contents = self._contents_of(step)
        if not contents.model or contents.optimizer or contents.other or step != series[-1]:
            return False
        return any(c.optimizer and c.other for c in map(self._contents_of, series[:-1]))

    def is_state_beside(self, step: Step) -> bool:
        """Return whether a file without a model lies once beside steps with one.

        As the optimizer of the latest, or the arguments, unless its name says that it has a model.
        """
        name = step.path.name
        is_one_file = "" in self._run.files_in(step.path) and not step.beside
        has_none = role_of(name) == "optimizer" or may_be_empty(name)
        if step.number is not None or not is_one_file or is_spared(name) or not has_none:
            return False
        neighbours = (s for s in self._run.steps if s.path.parent == step.path.parent)
        neighbours = (s for s in neighbours if s.number is not None)
        has_model = self._contents_of(step).model
        return not has_model and any(self._contents_of(s).model for s in neighbours)

    def _is_state_of_each(self, step: Step) -> bool:
        """Return whether a step's series has no model, and a step of its number elsewhere has one.

        As slime's ``rollout/global_dataset_state_dict_59.pt`` beside ``iter_0000059``, or beside
        ``iter_0000060``: what trains with FSDP there counts from 1.
        """
        if step.number is None or not may_be_empty(step.path.name):
            return False
        series = map(self._contents_of, self._run.by_series[step.series])
        if any(contents.model or contents.optimizer for contents in series):
            return False
        numbers = step.number, step.number + 1
        counterparts = (s for s in self._run.steps if s.position and s.number in numbers)
        return any(self._contents_of(counterpart).model for counterpart in counterparts)

    def _is_model_beside(self, step: Step) -> bool:
        """Return whether a step is a model alone, and what is resumed from lies beside it.

        Its name calls it a copy, as llm-foundry's ``huggingface/ba10``; or its series counts what
        another does, as PRIME-RL's ``weights/step_10`` and ``checkpoints/step_10``; or it is of a
        series that never has an optimizer.
        """
        contents = self._contents_of(step)
        if not contents.model or contents.optimizer:
            return False
        other_steps = [other for other in self._run.steps if other.series != step.series]
        if (originals := self._originals(step, other_steps)) is not None:
            return any(map(self._resumes, originals))
        series = self._run.by_series[step.series]
        positions = {s.position for s in series if s.position}  # one of a pair may be damaged
        parent = step.path.parent.name
        of_models = role_of(parent) == "model" and is_part_folder(parent)
        neighbours = (other for other in other_steps if other.home == step.home or of_models)
        if any(self._resumes(other) for other in neighbours if other.position in positions):
            return True
        if step.series not in self._never_resumed:
            self._never_resumed[step.series] = self._is_never_resumed(series, other_steps)
        return self._never_resumed[step.series]

    def _is_never_resumed(self, series: Sequence[Step], other_steps: Sequence[Step]) -> bool:
        """Return whether a series never has an optimizer, and what is resumed from lies beside."""
        if not self._has_resumed_from(self._neighbours(series[0], other_steps)):
            return False
        return not any(self._contents_of(step).optimizer for step in series)

    def _originals(self, step: Step, other_steps: Sequence[Step]) -> Sequence[Step] | None:
        """Return the steps that one may be a copy of, by its name or its folder's; None if none.

        They lie beside it, or in a folder below if a copy has their number: xtuner's ``hf-30`` and
        ``checkpoints/ckpt-step-30``.
        """
        folder = step.path.parent.name if step.path.parent != self._run.path else ""
        rest = re.sub(_COPY, "", without_words(folder)).strip("-_.")
        if re.search(_COPY, folder) is not None and not rest:
            parent = step.home.parent
            return [s for s in other_steps if parent in (s.home, *s.home.parents)]
        if re.search(_COPY, step.path.name) is not None:
            numbers = {copy.number for copy in self._run.by_series[step.series]}
            below = (s for s in other_steps if step.home in s.home.parents)
            below = (s for s in below if step.number is None or s.number in numbers)
            return [*(s for s in other_steps if s.home == step.home), *below]
        return None

    def _neighbours(self, first: Step, other_steps: Iterable[Step]) -> Iterator[Step]:
        """Yield the steps beside the first one of a series, but for older ones, as of a base model.

        A model without a number may also lie below or above them: diffusion-pipe's ``epoch3``
        beside ``global_step300``, rsl_rl's ``exported/policy.pt`` below ``model_150.pt``,
        SchNetPack's ``best_model`` above ``checkpoints``.
        """
        is_counted, start = first.number is not None, save_time(first, self._run) or 0.0
        start = 0.0 if re.search(_AVERAGED, first.path.name) else start
        homes = {first.home} if is_counted else {first.home, *first.home.parents}
        for step in other_steps:
            is_near = step.home in homes or (not is_counted and first.home in step.home.parents)
            if is_near and (save_time(step, self._run) or start) >= start - AT_ONCE:
                yield step

    def _has_resumed_from(self, steps: Iterable[Step]) -> bool:
        """Return whether any series of some steps can be resumed from."""
        series: dict[object, list[Step]] = {}
        for step in steps:
            series.setdefault(step.series, []).append(step)
        return any(self._resumes(step) for group in series.values() for step in group[-_NEWEST:])

    def _resumes(self, step: Step) -> bool:
        contents = self._contents_of(step)
        return contents.model and contents.optimizer
