"""What the name of an entry of a run says: what it counts, what kind it is, and what part of it.

Only a named step or epoch is a step. Digits of a metric, an element type, a model's size, a date,
or of a run, a fold, a seed or a version tell entries apart: each such number is a kind of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence, Set
from functools import lru_cache
from itertools import pairwise

from msgspec import Struct
from msgspec.structs import replace

from ckptool.commands.runs.trainers import TRAINERS
from ckptool.serialization.file_roles import WORDS

# Patterns are text: re compiles and keeps those that are used, and most commands use few.
_TYPE = (
    r"(?i)(?<![a-z])(?:(?:mx|nv)?fp|bf|b?float|u?int|nf)(?:4|6|8|16|32|64)(?!\d)"
    r"(?:_?e[2-8]m[0-3](?!\d))?"
    r"|(?<![a-z])i?q[1-8](?:_(?:[01]|[klmsx]+))*(?![a-z0-9])"
    r"|(?<![a-z])w(?:4|8|16)a(?:4|8|16)(?!\d)"
    r"|(?<!\d)[1-8]-?bits?(?![a-z])(?:-\d+g(?![a-z]))?"
)
"""An element type or a quantization, as in ``diffusion_pytorch_model.fp16.safetensors``,
``flux.fp8_e4m3fn.pt``, ``model-q4_0.safetensors``, ``gptq_model-4bit-128g.safetensors``."""
_NUMBER = r"(?P<number>\d{1,18})(?P<unit>k|m)?(?![a-z0-9])(?!\.\d)"
_UNITS = {None: 1, "k": 1000, "m": 1_000_000}
_HYPER = r"(?<!max[-_])(?<!total[-_])(?<!num[-_])(?<!warmup[-_])(?<!accum[-_])(?<!processor[-_])"
"""Not before a word: settings, and steps of a processor of data (LeRobot 0.4, pipeline.py)."""


def _after(words: str) -> str:
    return rf"(?i)(?<![a-z]){_HYPER}{words}[-_=]?{_NUMBER}"


_STEP = _after("(?:global[-_]?)?steps?")
_ITERATION = _after("(?:iter(?:ation)?s?|ba|batch|updates?)")
_CHECKPOINT = _after("(?:checkpoint|ckpt)")
_EPOCH = _after("(?:epoch|ep)")
_STAGE = _after("stage")
_COUNTED = (
    rf"(?i)(?<![a-z\d.]){_HYPER}(?P<number>\d{{1,18}})(?P<unit>(?!))?[-_](?:steps|epochs|iter(?:ation)?s)"
    r"(?![a-z])"
)
"""A number before its word, as in ``rl_model_80_steps`` of stable-baselines3; often a length."""
_METRIC = (
    r"(?:loss|acc|accuracy|auc|auroc|ap|map|f1|iou|miou|dice|bleu|rouge|ppl|perplexity|wer|cer|psnr"
    r"|ssim|fid|score|metric|err|error|mse|mae|rmse|r2|recall|precision|top[15]|val|valid|eval|test"
    r"|rew(?:ard)?|return|kl|em|mrr|ndcg|nll|bp[bc]|elbo|tokens|samples)"
)
_IS_METRIC = rf"(?i)(?<![a-z]){_METRIC}(?![a-z])"
_VALUE = r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?%?"
_VALUES = (
    rf"(?i)(?<=[a-z0-9]=){_VALUE}|(?<![a-z]){_METRIC}[-_]?{_VALUE}[bmt]?(?![a-z0-9])"
    r"|(?:^|(?<=[\d#])[-_]+)[-+]?\d+\.\d+(?:e[-+]?\d+)?(?!\d)"
)
"""The value of a metric: ``val_loss=0.39``, ``acc_93``, or behind another number ``00-0.39``."""
_OF_RUN = r"(?i)(?:test|val|valid|eval)[-_]?\d+|[a-z]+[-_]?\d"
"""What may be the value of a metric, or tell runs apart: ``test12``, ``loss2``. Steps of two runs
that are taken for one are lost with it."""
_APART = (
    r"(?i)(?<![\d.])\d+(?:\.\d+)?[bt](?![a-z0-9])"
    r"|(?<!\d)\d+(?:-of-\d+|-?best(?![a-z])|(?:[km]|x\d+(?:\.\d+)?[bm]?)(?![a-z0-9]))"
    r"|(?<![a-z])(?:run|exp|experiment|fold|cv|seed|version|ver|v|trial|split|job|id|attempt|replica"
    r"|replicat|worker|node|gpu|rank|part|shard|member|model_parallel|layer|expert|stage)s?[-_=]?\d+"
    r"|(?<![a-z0-9])[a-z][\w/]{0,99}(?==)|(?<![a-z0-9])(?=[0-9a-f]*\d)"
    r"(?=[0-9a-f]*[a-f])[0-9a-f]{7,40}(?![a-z0-9])"
)
"""Numbers of what is not a step: sizes, runs, how many were averaged, hashes."""
_DAY = r"(?<!\d)(?:19|20)\d\d[-_.][01]\d[-_.][0-3]\d(?!\d)"
_DATE = (
    r"(?<!\d)(?:19|20)\d\d[-_.]?[01]\d[-_.]?[0-3]\d(?:[-_tT.+]?\d\d[-_:.]?\d\d"
    r"(?:[-_:.]?\d\d)?(?:\+\d\d)?)?(?!\d)|(?<!\d)\d\d[-_:]\d\d[-_:]\d\d(?!\d)"
)
_BARE = r"(?i)(?:(?<![\d.])|(?<=[a-z]\.))(?<!\de)\d{1,18}(?!\d|\.\d|e\d)"
SUFFIX = r"(?i)(?:\.(?:pt|py?th|th|bin|pkl|pickle|ckpt|safetensors|json|npz|npy|tar|state)){1,4}$"


class Position(Struct, frozen=True):
    """What a checkpoint counts, None where nothing says: a run's stage, then epoch, then step."""

    stage: int | None = None
    epoch: int | None = None
    step: int | None = None

    @property
    def number(self) -> int | None:
        """Return the training step, else the epoch."""
        return self.epoch if self.step is None else self.step

    def numbers(self, counted: Iterable[str]) -> list[int | None]:
        """Return the numbers of what is ``counted``: ``epoch``, ``step``."""
        return [self.epoch if word == "epoch" else self.step for word in counted]

    def __bool__(self) -> bool:
        return self.number is not None


class EntryName(Struct, frozen=True):
    """What a name says.

    ``position`` is named, by a word or in a trainer's own way; ``bare`` is a number without a word.
    ``kind`` is the name without what counts and without metrics, ``family`` also without the
    ``role`` that it has in a step of several entries: ``opt``, ``rank3``. ``tells`` is whether the
    number must be a step, as that of a file ``checkpoint_3.pt`` need not be.
    """

    position: Position
    bare: int | None
    kind: str
    family: str
    role: str
    tells: bool

    @property
    def has_rank(self) -> bool:
        """Return whether it is what one rank wrote."""
        return "rank" in self.role


Spans = dict[str, tuple[int, int, int]]
"""Where a name has what it counts, and the number."""


@lru_cache(1 << 14)
def parse_name(name: str, *, is_folder: bool) -> EntryName:
    """Return what a name says, in the way of a trainer of the table, else by its words."""
    spans, tells = _by_trainer(name)
    if not spans:
        spans, tells = _by_words(name, is_folder=is_folder)
    counts = {key: spans[key][2] for key in ("stage", "epoch", "step") if key in spans}
    bare = spans.get("bare") or (None if spans else _bare(name))
    position = Position(**counts)
    marks = [(*spans[key][:2], "#") for key in ("epoch", "step", "date") if key in spans]
    marks += [(*bare[:2], "#")] if bare is not None else []
    kind = _with_marks(name, marks)
    parts = [(*spans[key][:2], "rank") for key in ("rank", "part") if key in spans]
    family = re.sub(WORDS, "", _with_marks(name, marks + parts))
    family = re.sub(r"[-_.]+", "-", re.sub(SUFFIX, "", family).replace("rank", "")).strip("-")
    roles = [match[0].lower() for match in re.finditer(WORDS, kind)]
    roles += [f"rank{spans['rank'][2]}"] if "rank" in spans else []
    roles = [name[slice(*spans["part"][:2])]] if "part" in spans else roles
    number = None if bare is None else bare[2]
    role = " ".join(dict.fromkeys(roles))
    return EntryName(position, number, kind, family + "/" * is_folder, role, tells)


def part_folders(folders: Sequence[str], *, has_rank: bool) -> Sequence[str]:
    """Return the last folders of a path that say no more than which part of each step they have.

    As ``model``, ``optim``, ``_actor`` or ``mp_rank_00``; with ``has_rank`` a number is a rank's.
    """
    at = len(folders)
    while at and (is_part_folder(folders[at - 1]) or (has_rank and folders[at - 1].isdecimal())):
        at -= 1
    return folders[at:]


def is_part_folder(name: str) -> bool:
    """Return whether a folder's name says no more than which part of each step it has.

    As ``model``, ``optim``, ``_actor`` or ``mp_rank_00``.
    """
    return (
        not re.sub(r"[-_.\d]", "", re.sub(WORDS, "", name)) and re.search(WORDS, name) is not None
    )


def entry_in(
    parts: tuple[str, ...], *, is_folder: bool, fixed: Set[str] = frozenset()
) -> tuple[int, Position]:
    """Return the part of a relative path that is a step's entry, and what it counts.

    It is the outermost name that counts, unless one below counts something else: the step of an
    epoch, or one of another training. Names that are ``fixed`` count nothing below another.
    """
    at, position = len(parts) - 1, Position()
    for index, part in enumerate(parts):
        if position and part in fixed:
            continue
        name = parse_name(part, is_folder=index < len(parts) - 1 or is_folder)
        inner = name.position
        is_deeper = bool(position) and (not name.tells or inner.number == position.number)
        if inner and not is_deeper:
            epoch = None if position.step is not None else position.epoch
            at, position = index, inner if inner.epoch is not None else replace(inner, epoch=epoch)
    return at, replace(position, stage=position.stage or stage_in(parts)) if position else position


def fixed_names(paths: Iterable[Sequence[str]]) -> Set[str]:
    """Return names that count 0 or 1, and are the only one of their kind in each of several steps.

    One step may lack it, whose save was not finished. In one step alone such a number may be of
    another training, unless it is 0. As ``iter_0000000`` in each step of NeMo-RL, and
    ``iter_0000001`` in those of ROLL.
    """
    steps: dict[tuple[str, ...], set[str]] = {}
    inside: dict[tuple[tuple[str, ...], tuple[str, ...]], list[tuple[str, str]]] = {}
    for parts in paths:
        names = [parse_name(part, is_folder=True) for part in parts]
        counts = [at for at, name in enumerate(names) if name.position and name.tells]
        for at in counts:
            steps.setdefault((*parts[:at], names[at].kind), set()).add(parts[at])
        for outer, inner in pairwise(counts):
            if names[outer].position.step is not None and names[inner].position.step in (0, 1):
                series = (*parts[:outer], names[outer].kind)
                below = (*parts[outer + 1 : inner], names[inner].kind)
                inside.setdefault((series, below), []).append((parts[outer], parts[inner]))
    fixed: set[str] = set()
    for (series, _), pairs in inside.items():
        holders, inner_names = {step for step, _ in pairs}, {name for _, name in pairs}
        name, *rest = inner_names
        is_zero = not parse_name(name, is_folder=True).position.number
        if not rest and len(steps[series]) - len(holders) <= 1 and (len(holders) > 1 or is_zero):
            fixed.add(name)
    return fixed


def stage_in(names: Iterable[str]) -> int | None:
    """Return the stage that the folders around a step name."""
    matches = (re.search(_STAGE, name) for name in names)
    return next((int(match["number"]) for match in matches if match is not None), None)


def step_named(name: str) -> int | None:
    """Return the training step at the end of a name; None if that may not be a step."""
    matches = (re.search(pattern, name) for pattern in (_STEP, _ITERATION, _OF_TRAINER))
    return next((_value(m) for m in matches if m is not None and m.end() == len(name)), None)


_OF_TRAINER = r"^checkpoint-(?P<number>\d{1,18})(?P<unit>(?!))?"
"""As transformers' Trainer counts steps; ``checkpoint_0`` of accelerate counts saves."""


def _by_trainer(name: str) -> tuple[Spans, bool]:
    for row in TRAINERS:
        match = row.steps.fullmatch(name)
        if match is not None:
            keys = [key for key, text in match.groupdict().items() if text is not None]
            numbers = {key: int(re.sub(r"\D", "", match[key]) or 0) for key in keys}
            return {key: (*match.span(key), number) for key, number in numbers.items()}, row.tells
    return {}, False


def _by_words(name: str, *, is_folder: bool) -> tuple[Spans, bool]:
    """Return what the words step, iteration, checkpoint and epoch count in a name."""
    clean = _blank(_DAY, _blank(_TYPE, name))
    spans: Spans = {}
    if (match := _search(_EPOCH, clean)) is not None:
        spans["epoch"] = (*match.span("number"), _value(match))
    if (match := _search(_STEP, clean) or _search(_ITERATION, clean)) is not None:
        spans["step"] = (*match.span("number"), _value(match))
    tells = bool(spans)
    if not spans and (match := _search(_CHECKPOINT, clean)) is not None:
        spans["step"] = (*match.span("number"), _value(match))
        tells = is_folder
    if not spans and (match := _search(_COUNTED, clean)) is not None:
        key = "epoch" if "epoch" in match[0].lower() else "step"
        spans[key] = (*match.span("number"), _value(match))
    if spans and (match := _search(_STAGE, clean)) is not None:
        spans["stage"] = (*match.span("number"), _value(match))
    return spans, tells


def _search(pattern: str, name: str) -> re.Match[str] | None:
    """Return the first match of a counting word that is no metric, as ``acc_epoch=93`` is."""
    for match in re.finditer(pattern, name):
        head = re.split(r"[-.]|(?<=\d)_", name[: match.start()])[-1]
        is_value = "=" in match[0] and re.search(_IS_METRIC, head.replace("_", " ")) is not None
        if not is_value:
            return match
    return None


def _value(match: re.Match[str]) -> int:
    return int(match["number"]) * _UNITS[match["unit"] and match["unit"].lower()]


def _bare(name: str) -> tuple[int, int, int] | None:
    """Return the last number of a name that may be a step; None if there is none."""
    clean = re.sub(SUFFIX, lambda m: " " * len(m[0]), name)
    for pattern in (_TYPE, _VALUES, _DATE, _APART):
        clean = _blank(pattern, clean)
    matches = list(re.finditer(_BARE, clean))
    return (*matches[-1].span(), int(matches[-1][0])) if matches else None


def _blank(pattern: str, name: str) -> str:
    """Return a name of the same length without what a pattern matches: ``checkpoint-4bit-300``."""
    return re.sub(pattern, lambda match: " " * len(match[0]), name)


def _with_marks(name: str, marks: list[tuple[int, int, str]]) -> str:
    """Return a name with marks instead of what counts, and of the values of metrics."""
    for start, end, mark in sorted(marks, reverse=True):
        name = name[:start] + mark + name[end:]
    return re.sub(_VALUES, lambda m: m[0] if re.fullmatch(_OF_RUN, m[0]) else "~", name)
