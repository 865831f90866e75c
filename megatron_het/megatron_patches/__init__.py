"""Runtime patches to Megatron: what one is, how patches are installed and taken out again.

A patch rebinds one name of an upstream module or class.  It states why no public hook does, which
upstream version it was written against, and the hash of every piece of upstream source that it
replaces or relies on.  Installing refuses when a hash differs, and a unit test compares all of
them, so an upgrade of Megatron fails visibly and at once.

``patches.py`` has all patches, ``torch_checkpoints.py`` guards torch's reading and writing of checkpoints, and
``releases.py`` says what is known of each release of Megatron and torch.

A new patch is a :class:`Patch` in ``PATCHES`` of ``patches.py``.  Importing it must not import torch or Megatron, so
``build``, which takes the original and returns what stands in its place, imports late.
``python -m megatron_het.megatron_patches`` lists all patches and prints the hashes of the installed
Megatron, to be pasted into ``sources`` once the new source has been read.  The project keeps the
number of patches at ten, beside those that a single release needs (``patches.OF_RELEASES``).
"""

import functools
import hashlib
import importlib
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_het.megatron_patches.releases import RELEASES, PatchError, installed_release

UPSTREAM_VERSION = RELEASES[0].version
"""The release of megatron-core that the hashes of a patch belong to; ``releases.py`` has those of others."""

Builder = Callable[[Any], Any]  # takes the original object and returns what replaces it


@dataclass(frozen=True)
class Patch:
    """One rebinding of an upstream name."""

    name: str  # unique short name
    # Patches that are installed together: ``"stock"`` for what stock Megatron needs on every run, other groups for what
    # a feature needs.
    group: str
    target: str  # dotted name that is rebound, e.g. ``"megatron.training.training.train_step"``
    reason: str  # why it is needed and why no public hook does
    # hashes (:func:`source_hash`) of the upstream source behind each dotted name that the patch replaces, wraps or
    # relies on: the target, or the methods that a subclass of the target overrides
    sources: Mapping[str, str]
    # Takes the original and returns the replacement.  None for a patch whose builder is handed to :func:`install`,
    # because the replacement belongs to one run.
    build: Builder | None = None
    applies: Callable[[], bool] = lambda: True  # asked at install time; False leaves upstream as it is on this machine
    version: str = UPSTREAM_VERSION  # the megatron-core release that ``sources`` was taken from

    def __post_init__(self) -> None:
        if not self.sources:
            raise ValueError(f"patch {self.name}: no source of upstream is watched")
        if len(self.reason) < 20:
            raise ValueError(f"patch {self.name}: the reason {self.reason!r} explains nothing")


@dataclass
class _Installed:
    patch: Patch
    owner: Any
    attribute: str
    original: Any = field(repr=False)
    own_attribute: bool = True


# Rebinding a name of a module is process-wide by nature; this is the record of it.
_INSTALLED: dict[str, _Installed] = {}


@functools.cache
def all_patches() -> Mapping[str, Patch]:
    """Every patch of the project by name; raises PatchError if two patches share a name or a target."""
    found: dict[str, Patch] = {}
    targets: dict[str, str] = {}
    for patch in importlib.import_module(f"{__name__}.patches").PATCHES:
        if patch.name in found:
            raise PatchError(f"two patches are called {patch.name!r}")
        if patch.target in targets:
            raise PatchError(f"patches {targets[patch.target]!r} and {patch.name!r} both rebind {patch.target}")
        found[patch.name] = patch
        targets[patch.target] = patch.name
    return found


def _resolve(dotted: str) -> tuple[Any, str]:
    """The object that owns the last part of a dotted name, and that part."""
    parts = dotted.split(".")
    for split in range(len(parts) - 1, 0, -1):
        module_name = ".".join(parts[:split])
        try:
            owner: Any = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is not None and (module_name + ".").startswith(error.name + "."):
                continue
            raise
        for part in parts[split:-1]:
            owner = getattr(owner, part, None)
        if owner is not None and hasattr(owner, parts[-1]):
            return owner, parts[-1]
        break
    raise PatchError(f"upstream has no {dotted}; the patches were written for megatron-core {UPSTREAM_VERSION}")


def _original(dotted: str) -> Any:
    """The object behind a dotted name as upstream defines it, whatever is installed."""
    for record in _INSTALLED.values():
        if record.patch.target == dotted:
            original = record.original
            return original.__func__ if isinstance(original, staticmethod) else original
    owner, attribute = _resolve(dotted)
    return getattr(owner, attribute)


def source_hash(dotted: str) -> str:
    """The first 16 digits of the SHA-256 of the source of an upstream function, method, class or module.

    Indentation, blank lines, trailing blanks and lines that hold only a comment do not count.

    Raises:
        PatchError: Upstream has no such name, or its source is not available.
    """
    return text_hash(source_text(dotted))


def text_hash(source: str) -> str:
    """The hash of what :func:`source_text` returns: 64 bits tell sources apart that nobody forges."""
    return hashlib.sha256(source.encode()).hexdigest()[:16]


def source_text(dotted: str) -> str:
    """The source of an upstream name as it is hashed; see :func:`source_hash`."""
    try:
        return _text_of(inspect.unwrap(_original(dotted)))
    except (TypeError, OSError) as error:
        raise PatchError(f"no source for {dotted}: {error}") from error


@functools.cache
def _text_of(original: Any) -> str:
    """See :func:`source_text`; a process that enters training again has read the sources before."""
    source = inspect.getsource(original)
    lines = (line.rstrip() for line in textwrap.dedent(source).splitlines())
    return "\n".join(line for line in lines if line and not line.lstrip().startswith("#"))


def moved(sources: Mapping[str, str]) -> dict[str, str]:
    """Dotted names whose upstream source has another hash than the one given, with the hash found.

    Args:
        sources: Hash of the source in the first release by dotted name; the installed one may have another.

    Raises:
        PatchError: Upstream has no such name.
    """
    release = installed_release()
    here = {**sources, **release.changed}
    found = {dotted: source_hash(dotted) for dotted in sources}
    return {
        dotted: value for dotted, value in found.items() if value not in (here[dotted], release.earlier.get(dotted))
    }


def watch(what: str, sources: Mapping[str, str]) -> None:
    """Refuse to go on with something that leans on upstream code which is different now.

    Args:
        what: Who leans on it.
        sources: Hash of the source by dotted name.

    Raises:
        PatchError: A source is different, or upstream has no such name.
    """
    changed = moved(sources)
    if changed:
        raise PatchError(
            f"{what} was written for megatron-core {UPSTREAM_VERSION}, but the installed source of "
            f"{', '.join(changed)} is different. Install megatron-core=={UPSTREAM_VERSION}, or read the change "
            "and update the hash."
        )


def _selected(selection: tuple[str, ...]) -> Iterator[Patch]:
    patches = all_patches()
    groups = {patch.group for patch in patches.values()}
    for key in selection:
        if key in patches:
            yield patches[key]
        elif key in groups:
            yield from (patch for patch in patches.values() if patch.group == key)
        else:
            raise PatchError(
                f"no patch or group is called {key!r}; patches: {', '.join(sorted(patches))}; "
                f"groups: {', '.join(sorted(groups))}"
            )


def install(*selection: str, builders: Mapping[str, Builder] | None = None) -> tuple[str, ...]:
    """Install patches by name or group; what is installed already stays as it is.

    Either all selected patches get installed or none: sources are compared first.

    Args:
        selection: Names of patches and groups.
        builders: For patches without a builder of their own: name to builder.

    Returns:
        Names of the patches that this call installed (not those that do not apply here).

    Raises:
        PatchError: Unknown name, changed upstream source, or a builder missing or given twice.
    """
    builders = dict(builders or {})
    todo: dict[str, Patch] = {}
    for patch in _selected(selection):
        if patch.name in builders and (patch.build is not None or patch.name in _INSTALLED):
            raise PatchError(f"patch {patch.name}: it has a builder already")
        if patch.name in _INSTALLED or patch.name in todo or not patch.applies():
            continue
        if patch.build is None and patch.name not in builders:
            raise PatchError(f"patch {patch.name}: install() needs its builder")
        changed = moved(patch.sources)
        if changed:
            raise PatchError(
                f"patch {patch.name} was written for megatron-core {patch.version}, but the "
                f"installed source of {', '.join(changed)} is different. Install "
                f"megatron-core=={patch.version}, or read the change and update the patch."
            )
        todo[patch.name] = patch
    for patch in todo.values():
        _rebind(patch, patch.build or builders[patch.name])
    return tuple(todo)


def _rebind(patch: Patch, build: Builder) -> None:
    owner, attribute = _resolve(patch.target)
    own_attribute = attribute in vars(owner)
    # Not getattr alone: it would lose that a method is static.
    raw = vars(owner)[attribute] if own_attribute else getattr(owner, attribute)
    replacement = build(getattr(owner, attribute))
    if isinstance(raw, staticmethod):
        replacement = staticmethod(replacement)
    setattr(owner, attribute, replacement)
    _INSTALLED[patch.name] = _Installed(patch, owner, attribute, raw, own_attribute)


def uninstall(*selection: str) -> tuple[str, ...]:
    """Take installed patches out again, without arguments all of them, the latest first; returns their names."""
    wanted = {patch.name for patch in _selected(selection)} if selection else set(_INSTALLED)
    names = tuple(name for name in reversed(_INSTALLED) if name in wanted)
    for name in names:
        record = _INSTALLED.pop(name)
        if record.own_attribute:
            setattr(record.owner, record.attribute, record.original)
        else:
            delattr(record.owner, record.attribute)
    return names


def installed() -> tuple[str, ...]:
    """Names of the installed patches in the order of installation."""
    return tuple(_INSTALLED)
