"""The checks of one checkpoint, from its own files alone, in their order.

No problem stops the rest: what a scan skips becomes a finding, every file is checked by itself, and
then the content is read once, or the requested share of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import chain

from msgspec.structs import replace

from ckptool.commands.open import Survey, survey
from ckptool.commands.options.verify import VerifyOptions
from ckptool.commands.verify.checks.consistency import (
    catalog_problems,
    config_file_problems,
    replica_problems,
    unnamed_latest,
)
from ckptool.commands.verify.checks.content import (
    Views,
    attach,
    locate_numbers,
    locate_whole,
    located,
    scattered_not_finite,
    unchecked_problems,
)
from ckptool.commands.verify.checks.elements import Content, Elements
from ckptool.commands.verify.checks.files import FileCheck, name_problems, newer_than_metadata
from ckptool.commands.verify.checks.meaning.counts import optimizer_step_problems
from ckptool.commands.verify.checks.meaning.table import (
    meaning_problems,
    metadata_problems,
    senses_of,
)
from ckptool.commands.verify.checks.pickles import odd_values
from ckptool.commands.verify.checks.recorded_hashes import SHA256, hash_problems, recorded_hashes
from ckptool.commands.verify.checks.sample import DataPart, DataSample
from ckptool.commands.verify.checks.training import differing_step_values, optimizer_problems
from ckptool.commands.verify.checks.unwritten import unwritten_problems
from ckptool.commands.verify.codes import is_error, require_codes
from ckptool.commands.verify.findings import DAMAGE, Findings, VerifyReport, summarize
from ckptool.core.catalog import Catalog, TensorEntry
from ckptool.core.quantization.names import packed_names
from ckptool.engine.check.content import check_spans, planned
from ckptool.engine.check.replicas import copied_files
from ckptool.engine.check.spans import ByteSpan
from ckptool.engine.progress import UNWATCHED, Progress
from ckptool.engine.ranks import Ranks
from ckptool.engine.share import ALL, Share
from ckptool.errors import CkptoolError, Problem
from ckptool.formats.companions import lost_random_states
from ckptool.storage.file_status import changed
from ckptool.storage.files import Files
from ckptool.storage.url import Location


def examine(
    path: Location,
    options: VerifyOptions,
    progress: Progress = UNWATCHED,
    *,
    digest: bool = False,
    share: Share = ALL,
    model: Elements | None = None,
) -> Verification:
    """Check the checkpoint at ``path``, or a share of its data; hash whole files, too, if asked.

    The file of an optimizer is checked beside its ``model``. Raises NotFound and Unrecognized if
    there is no checkpoint, UsageError for an unknown code.
    """
    require_codes(options.ignore)
    verification = Verification(survey(path, options.read), options, share, model)
    verification.check_structure(path)
    if not options.quick:
        verification.check_content(progress, digest=digest)
    return verification


class Verification:
    """The survey of a checkpoint, and the problems so far.

    ``content`` is what was read, with the SHA-256 (hex) of whole files; ``elements`` is the same
    for checks of values, None unless all was read.
    """

    def __init__(
        self, surveyed: Survey, options: VerifyOptions, share: Share, model: Elements | None
    ) -> None:
        self.surveyed, self._model = surveyed, model
        self.elements: Elements | None = None
        self._options = options
        self._problems: list[Problem] = []
        self._sample = (
            DataSample(options.sample, options.seed)
            if share.is_all
            else DataPart(share, surveyed.catalog, surveyed.source.files)
        )
        self._files = FileCheck(surveyed, self._sample.takes, quick=options.quick)
        self._unchecked: set[str] = set()
        self._of_files: list[Problem] | None = None
        self._of_pickles: list[Problem] | None = None
        self.content = Content()
        place = surveyed.path, surveyed.source, self._own_files
        # of several processes that share the work one says what is wrong with hash files
        unusable = self._problems if self._sample.checks_whole else []
        self._hashes = [] if options.quick else recorded_hashes(*place, unusable)

    @property
    def _own_files(self) -> Mapping[str, int]:
        """The files of the checkpoint and its model; all that there are, if it cannot be read."""
        catalog = self._catalog
        return catalog.files | catalog.companions if catalog else self.surveyed.source.files

    @property
    def _catalog(self) -> Catalog | None:
        return self.surveyed.catalog

    def check_structure(self, path: Location) -> None:
        """Check metadata, names and sizes; ``path`` is what the user gave."""
        source, row, catalog = self.surveyed.source, self.surveyed.format, self._catalog
        if (marker := row.detection.latest) is not None:
            self._problems += unnamed_latest(path, self.surveyed.path, marker)
        rules, bare = self._files.rules, catalog.bare if catalog else frozenset()
        # names of bare files are tensors' names and prove nothing
        name_rules = {file: rule for file, rule in rules.items() if file not in bare}
        self._problems += name_problems(source, row, name_rules)
        self._problems += newer_than_metadata(source, rules)
        self._files.look_at_metadata(catalog)
        if catalog is not None:
            self._problems += catalog_problems(catalog)
            self._problems += lost_random_states(source, catalog)
            self._problems += row.reading.checks(source, catalog)
            self._problems += optimizer_problems(catalog)
            self._problems += self._unless_damaged(metadata_problems(self.surveyed, catalog))
            self._problems += config_file_problems(source, row, catalog)
            self._problems += odd_values(catalog.objects.values())

    def _unless_damaged(self, problems: Iterator[Problem]) -> Iterator[Problem]:
        """Yield problems of what no training leaves, unless damage explains them."""
        causes = (*self._problems, *self.surveyed.problems)
        if not any(is_error(problem.code) for problem in causes):
            yield from problems

    def check_content(self, progress: Progress, *, digest: bool) -> None:
        """Open every archive, and read every record and tensor once, or every file."""
        catalog, source, row = self._catalog, self.surveyed.source, self.surveyed.format
        senses = senses_of(catalog, self._model) if self._sample.leaves_none else []
        content, hashed = Content(senses), dict[str, int]()
        self.content = content
        if catalog is None:
            self._files.find_items()
            self._check_part(None, progress)
        elif digest or not self._sample.is_all or row.reading.trim or not source.policy.by_request:
            # else in parts, which spares a store requests; but only all chunks of a tensor tell
            # what of it is padding
            whole = self._own_files if self._sample.is_all else {}
            runs = [(f, 0, n) for f, n in whole.items() if f in source.files]
            with planned(source, runs if source.policy.by_request else []):
                recorded = {h.file for h in self._hashes if h.algorithm == SHA256}
                hashed = {f: n for f, n in whole.items() if digest or f in recorded}
                self._check_part(catalog, progress, hashed)
        else:
            from ckptool.commands.verify.checks.parts import parts

            progress.begin(sum(catalog.files.values()))
            archives = self._files.archives
            of_files, archives.spans = archives.spans, []
            for part, announced in parts(catalog, source):
                archives.spans = [] if announced else of_files
                self._check_part(part, progress, announced=announced, begun=True)
        if catalog is not None:
            order = {name: at for at, name in enumerate(catalog.tensors)}
            content.problems.sort(key=lambda problem: order.get(problem.tensor or "", -1))
            self._files.look_beside_items(catalog.archives)
        self._problems += [*content.problems, *content.read.problems]
        if self._sample.checks_whole:
            self._problems += hash_problems(self._hashes, content.read.digests, hashed, source)
        self._check_elements()

    def _check_part(
        self,
        part: Catalog | None,
        progress: Progress,
        whole: Mapping[str, int] | None = None,
        *,
        announced: bool = False,
        begun: bool = False,
    ) -> None:
        """Open the archives of a part of the catalog, then read its records and tensors once.

        Progress of all parts may have ``begun``. Files of ``whole`` are read whole, to be hashed.
        """
        content, source, archives = self.content, self.surveyed.source, self._files.archives
        tensors: dict[str, TensorEntry] = {}
        if part is not None:
            tensors, problems = located(self.surveyed.format, source, part, self._sample.takes)
            tensors = self._sample.narrow(tensors)
            content.problems += problems
            self._files.look_at_items(part.archives)
        views = Views.of(tensors.values(), content.probes)
        inner = {item.file for item in part.archives} if part else set()
        stored, archives.spans = archives.spans, []
        spans = self._sample.of([*stored, *attach(views, stored)], inner)
        content.add(tensors, views, spans)
        if not begun:
            progress.begin(_bytes_to_read(spans, whole or {}))
        workers = self._options.workers or source.policy.workers
        content.read.add(check_spans(spans, source, workers, progress, whole, announced=announced))
        if self._sample.checks_whole:
            counters = tensors if self._sample.is_all else locate_numbers(self.surveyed)
            content.counters.read(counters.values(), source, announced=announced)

    def _check_elements(self) -> None:
        """Note oddities in the elements that were read, or are read again."""
        content, source = self.content, self.surveyed.source
        spans, names = content.spans, content.read.not_finite
        written, holes = self._sample.whole_files(content.read.written), content.read.holes
        if written or holes:
            self._problems += unwritten_problems(spans, written, holes, source.files)
        if self._sample.leaves_none:
            names |= self._read_again()
        names -= packed_names(self._catalog) if names and self._catalog else set()
        tensors = content.tensors
        if isinstance(self._sample, DataPart):  # so that all parts say the same of a tensor
            tensors = locate_whole(self.surveyed, sorted(names))
        if names:
            from ckptool.commands.verify.checks.nonfinite import not_finite_problems

            self._problems += not_finite_problems(tensors, names, source)
        if self._sample.leaves_none:
            files = {p.file for p in self._problems if p.file and p.code in DAMAGE}
            elements = Elements(content, source, files, self._sample.is_all, self._model)
            self._problems += meaning_problems(elements)
            self.elements = elements if elements.is_all else None
            steps = optimizer_step_problems(self.surveyed, self._catalog, content.counters.taken)
            self._problems += self._unless_damaged(steps)
        unchecked = {span.file for span in spans if span.crc32 is None and span.nbytes}
        covered = (h.file for h in self._hashes if self._sample.leaves_none)
        self._unchecked = unchecked.difference(covered)

    def _read_again(self) -> set[str]:
        """Check elements, which bytes do not show; return the tensors with NaN or infinity."""
        content, source = self.content, self.surveyed.source
        names: set[str] = set()
        if content.views.scattered:
            names, problems = scattered_not_finite(content.views, source)
            self._problems += problems
        self._problems += replica_problems(content.tensors.values(), source)
        if self._catalog is not None and self._sample.checks_whole:
            self._problems += differing_step_values(self._catalog)
            with suppress(CkptoolError):  # the reader of all data reports on these
                self._problems += copied_files(self._catalog, source)
        self._problems += content.counters.problems(self.surveyed)
        return names

    def join(self, ranks: Ranks) -> None:
        """Merge the findings of other ranks' shares."""
        files, pickles, read = self._files, self._files.pickles, self.content.read
        share = self._problems, files.problems, pickles.problems, self._unchecked, read.nbytes
        problems, of_files, of_pickles, unchecked, nbytes = zip(*ranks.gather(share), strict=True)
        self._problems, self._of_files = _distinct(problems), _distinct(of_files)
        self._of_pickles = _distinct(of_pickles)
        self._unchecked, read.nbytes = set[str]().union(*unchecked), sum(nbytes)

    def report(
        self, more: Iterable[Problem] = (), *, compared: Catalog | None = None, nbytes: int = 0
    ) -> VerifyReport:
        """Return the report of all findings, with those of ``more`` problems.

        ``compared`` is the catalog that these concern, of which ``nbytes`` were read.
        """
        options, catalog, source = self._options, self._catalog, self.surveyed.source
        of_files = self._files.problems if self._of_files is None else self._of_files
        of_pickles = self._files.pickles.problems if self._of_pickles is None else self._of_pickles
        unchecked = unchecked_problems(sorted(self._unchecked)) if self._unchecked else []
        problems = [
            *changes(source, self._own_files),
            *self.surveyed.problems,
            *map(self._as_copy_damage, [*self._problems, *unchecked, *of_files]),
            *more,
        ]
        findings, ignored = Findings(
            compared or catalog, source.files, options.ignore, options.fail_nonfinite
        ).of(problems, of_pickles)
        report = VerifyReport(
            self.surveyed.path,
            self.surveyed.format.name,
            tuple(findings),
            depth=options.depth if compared is None else "full",
            nbytes=self.content.read.nbytes + nbytes,
            files=len(catalog.files) if catalog else len(source.files),
            tensors=len(catalog.tensors) if catalog else 0,
            ignored=tuple(ignored),
        )
        report = replace(report, ok=not report.fails(options.strict))
        return replace(report, summary=summarize(report, options))

    def _as_copy_damage(self, problem: Problem) -> Problem:
        """Return a problem, of an unread copy as one that is no damage of the checkpoint."""
        copies = self._catalog.copies if self._catalog else frozenset()
        is_damaged = problem.file in copies and is_error(problem.code)
        return problem.recoded("copy-damaged") if is_damaged else problem


def _bytes_to_read(spans: Iterable[ByteSpan], whole: Mapping[str, int]) -> int:
    """Return how many bytes spans are, and files that are read whole, each byte once."""
    sizes = (span.nbytes for span in spans if span.packing or span.file not in whole)
    return sum(sizes) + sum(whole.values())


def _distinct(shares: Iterable[Iterable[Problem]]) -> list[Problem]:
    """Return the problems that several ranks found, each once."""
    problems = chain.from_iterable(shares)
    return list({(str(p), p.code, p.file, p.tensor): p for p in problems}.values())


def changes(source: Files, files: Iterable[str]) -> list[Problem]:
    """Return a problem if a file was written or replaced since the source was listed.

    The data read may then mix two saves.
    """
    names = source.changed([file for file in files if file in source.files])
    return list(changed(names).problems) if names else []
