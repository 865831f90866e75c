"""Runtime patches to Megatron: the record of a patch, installing, and uninstalling.

A patch rebinds one name of an upstream module or class.  It states why no public hook is enough, the
upstream version it was written against, and the hash of every piece of upstream source that it
replaces or relies on.  Installing refuses when a hash differs, and a unit test compares all of
them, so an upgrade of Megatron fails visibly and at once.

``patches.py`` has all patches, ``torch_checkpoints.py`` guards torch's reading and writing of checkpoints, and
``releases.py`` lists the supported releases of Megatron and torch, and where their sources differ.

A new patch is a :class:`Patch` in ``PATCHES`` of ``patches.py``.  Importing it must not import torch or Megatron, so
``build``, which takes the original and returns the replacement, imports late.
``python -m megatron_het.megatron_patches`` lists all patches, with the new hash of each source that has changed; paste
it into ``sources`` once the new source has been read.  The project keeps the number of patches at ten, without those
that a single release needs (``patches.OF_RELEASES``).
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

Builder = Callable[[Any], Any]  # takes the original object and returns the replacement


@dataclass(frozen=True)
class Patch:
    """One rebinding of an upstream name."""

    name: str  # unique short name
    # Patches that are installed together: ``"stock"`` are repairs of stock Megatron for every run, ``"plan"`` those
    # that only a run with a plan needs.
    group: str
    target: str  # dotted name that is rebound, e.g. ``"megatron.training.training.train_step"``
    reason: str  # why the patch is needed, and why no public hook is enough
    # hashes (:func:`source_hash`) of the upstream source behind each dotted name that the patch replaces, wraps or
    # relies on: the target, or the methods that a subclass of the target overrides
    sources: Mapping[str, str]
    # Takes the original and returns the replacement.  None for a patch whose builder is passed to :func:`install`,
    # because the replacement belongs to one run.
    build: Builder | None = None
    applies: Callable[[], bool] = lambda: True  # evaluated at install time; False: this machine needs no patch
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


# The installed patches by name.  Module state, because rebinding a name of a module acts on the whole process.
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
    """The object behind a dotted name as upstream defines it, even while a patch has rebound the name."""
    for record in _INSTALLED.values():
        if record.patch.target == dotted:
            original = record.original
            return original.__func__ if isinstance(original, staticmethod) else original
    owner, attribute = _resolve(dotted)
    return getattr(owner, attribute)


def source_hash(dotted: str) -> str:
    """The first 16 digits of the SHA-256 of the source of an upstream function, method, class or module.

    Common indentation, blank lines, trailing blanks and lines with only a comment are not hashed.

    Raises:
        PatchError: Upstream has no such name, or its source is not available.
    """
    return text_hash(source_text(dotted))


def text_hash(source: str) -> str:
    """The hash of a result of :func:`source_text`; 64 bits are enough, because nobody forges these sources."""
    return hashlib.sha256(source.encode()).hexdigest()[:16]


def source_text(dotted: str) -> str:
    """The source of an upstream name in the form that :func:`source_hash` hashes."""
    try:
        return _text_of(inspect.unwrap(_original(dotted)))
    except (TypeError, OSError) as error:
        raise PatchError(f"no source for {dotted}: {error}") from error


@functools.cache
def _text_of(original: Any) -> str:
    """See :func:`source_text`; cached for a process that enters training more than once."""
    source = inspect.getsource(original)
    lines = (line.rstrip() for line in textwrap.dedent(source).splitlines())
    return "\n".join(line for line in lines if line and not line.lstrip().startswith("#"))


def moved(sources: Mapping[str, str]) -> dict[str, str]:
    """Dotted names whose installed source has none of the hashes known for this release, with the hash found.

    Args:
        sources: Hash of the source in the first release by dotted name; ``Release.changed`` overrides it.

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
    """Refuse to continue if upstream source has changed that a feature or model family relies on.

    Args:
        what: Name of the feature or family, for the error.
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
    """Install patches by name or group; patches that are already installed are skipped.

    The sources of all selected patches are compared before the first is installed, so either all are or none.

    Args:
        selection: Names of patches and groups.
        builders: Builders by patch name, for patches with ``build=None``.

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
    # ``vars`` and not only ``getattr``, which returns the bare function of a staticmethod.
    raw = vars(owner)[attribute] if own_attribute else getattr(owner, attribute)
    replacement = build(getattr(owner, attribute))
    if isinstance(raw, staticmethod):
        replacement = staticmethod(replacement)
    setattr(owner, attribute, replacement)
    _INSTALLED[patch.name] = _Installed(patch, owner, attribute, raw, own_attribute)


def uninstall(*selection: str) -> tuple[str, ...]:
    """Uninstall patches, all of them without arguments, the last installed first; returns their names."""
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
