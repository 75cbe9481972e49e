"""Steps of a run that are good, and that training does not go on from: what lies beside those."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from ckptool.commands.runs.contents import AT_ONCE, saved
from ckptool.commands.runs.names import is_part_folder
from ckptool.commands.runs.records import Contents
from ckptool.commands.runs.steps import Run, Step
from ckptool.commands.runs.trainers import EXPORTS, SPARED
from ckptool.serialization.file_roles import may_be_empty, role_of, without_words
from ckptool.storage.url import Location, within

_COPY = r"(?i)(?<![a-z])(?:hf|hugging[-_]?face|export(?:s|ed)?|merged|converted)(?![a-z])"
"""What a name says of a model that is written for use, not to go on from."""
_NEWEST = 3
"""How many steps of a series are looked at, since the newest may be damaged."""


def is_export(step: Step, run: Location) -> bool:
    """Return whether a step lies where trainers put what training does not go on from."""
    return any(re.fullmatch(EXPORTS, name) is not None for name in within(step.path, run).parts)


class Exports:
    """Tells by what steps have, as ``contents_of`` says, which ones lie beside those of a run."""

    def __init__(self, run: Run, contents_of: Callable[[Step], Contents]) -> None:
        self._run = run
        self._contents_of = contents_of
        self._series: dict[object, list[Step]] = {}
        for step in run.steps:
            self._series.setdefault(step.series, []).append(step)
        self._never_resumed: dict[object, bool] = {}

    def are_all(self) -> bool:
        """Return whether all that the run has lies where exports do."""
        return all(is_export(each, self._run.path) for each in self._run.steps)

    def has(self, step: Step) -> bool:
        """Return whether a step is an export: a model or state alone, beside what has both.

        Raises NoAnswer.
        """
        if len(self._series) == 1:
            return False
        asked = self._is_state_beside, self._is_state_of_each, self._is_model_beside
        return any(is_so(step) for is_so in asked)

    def is_last(self, step: Step) -> bool:
        """Return whether it is a model alone, the last of whole steps: torchtitan saves it so."""
        alike = [each for each in self._series[step.series] if each.parts]
        mine = self._contents_of(step)
        if not mine.model or mine.optimizer or mine.other or step != alike[-1]:
            return False
        return any(c.optimizer and c.other for c in map(self._contents_of, alike[:-1]))

    def _is_state_beside(self, step: Step) -> bool:
        """Return whether it is a file without a model that lies once beside steps with one.

        As the optimizer of the latest, or the arguments, unless its name says that it has a model.
        """
        name, alone = step.path.name, "" in self._run.files_in(step.path) and not step.beside
        is_saved = re.fullmatch(SPARED, name) is not None
        has_none = role_of(name) == "optimizer" or may_be_empty(name)
        if step.number is not None or not alone or is_saved or not has_none:
            return False
        beside = (each for each in self._run.steps if each.path.parent == step.path.parent)
        counted = (each for each in beside if each.number is not None)
        is_model = self._contents_of(step).model
        return not is_model and any(self._contents_of(each).model for each in counted)

    def _is_state_of_each(self, step: Step) -> bool:
        """Return whether its series has nothing of a model, and what counts the same elsewhere has.

        As slime's ``rollout/global_dataset_state_dict_59.pt`` beside ``iter_0000059``.
        """
        if step.number is None or not may_be_empty(step.path.name):
            return False
        alike = map(self._contents_of, self._series[step.series])
        if any(contents.model or contents.optimizer for contents in alike):
            return False
        same = (s for s in self._run.steps if s.position and s.number == step.number)
        return any(self._contents_of(each).model for each in same)

    def _is_model_beside(self, step: Step) -> bool:
        """Return whether it is a model alone, and what is resumed from lies beside it.

        Its name calls it a copy, as llm-foundry's ``huggingface/ba10``; or its series counts what
        another does, as PRIME-RL's ``weights/step_10`` and ``checkpoints/step_10``; or it is of a
        series that never has an optimizer.
        """
        mine = self._contents_of(step)
        if not mine.model or mine.optimizer:
            return False
        others = [each for each in self._run.steps if each.series != step.series]
        if (copied := self._copied(step, others)) is not None:
            return any(map(self._resumes, copied))
        alike = self._series[step.series]
        counted = {each.position for each in alike if each.position}  # one of a pair may be damaged
        parent = step.path.parent.name
        of_models = role_of(parent) == "model" and is_part_folder(parent)
        near = (each for each in others if each.home == step.home or of_models)
        if any(self._resumes(each) for each in near if each.position in counted):
            return True
        if step.series not in self._never_resumed:
            self._never_resumed[step.series] = self._is_never_resumed(alike, others)
        return self._never_resumed[step.series]

    def _is_never_resumed(self, alike: Sequence[Step], others: Sequence[Step]) -> bool:
        """Return whether a series never has an optimizer, and what is resumed from lies beside."""
        if not self._has_resumed_from(self._beside(alike[0], others)):
            return False
        return not any(self._contents_of(each).optimizer for each in alike)

    def _copied(self, step: Step, others: Sequence[Step]) -> Sequence[Step] | None:
        """Return the steps that one may be a copy of, by its name or its folder's; None if none."""
        folder = step.path.parent.name if step.path.parent != self._run.path else ""
        rest = re.sub(_COPY, "", without_words(folder)).strip("-_.")
        if re.search(_COPY, folder) is not None and not rest:
            around = step.home.parent
            return [each for each in others if around in (each.home, *each.home.parents)]
        if re.search(_COPY, step.path.name) is not None:
            return [each for each in others if each.home == step.home]
        return None

    def _beside(self, first: Step, others: Iterable[Step]) -> Iterator[Step]:
        """Yield what lies beside the first step of a series, but for what its training began from.

        That is older. A model without a number may also lie below or above it:
        diffusion-pipe's ``epoch3`` beside ``global_step300``, rsl_rl's ``exported/policy.pt`` below
        ``model_150.pt``, SchNetPack's ``best_model`` above ``checkpoints``.
        """
        is_counted, began = first.number is not None, saved(first, self._run) or 0.0
        homes = {first.home} if is_counted else {first.home, *first.home.parents}
        for each in others:
            is_near = each.home in homes or (not is_counted and first.home in each.home.parents)
            if is_near and (saved(each, self._run) or began) >= began - AT_ONCE:
                yield each

    def _has_resumed_from(self, steps: Iterable[Step]) -> bool:
        """Return whether any series of some steps can be resumed from."""
        series: dict[object, list[Step]] = {}
        for step in steps:
            series.setdefault(step.series, []).append(step)
        return any(self._resumes(step) for found in series.values() for step in found[-_NEWEST:])

    def _resumes(self, step: Step) -> bool:
        contents = self._contents_of(step)
        return contents.model and contents.optimizer
