"""Lists the runtime patches and the upstream names that features use; compares their sources with the installed ones.

``--against`` compares these sources with a checkout of another release.  ``--patches`` prints the folder of the git
patches for a Megatron-LM checkout instead.
"""

import argparse
import ast
import difflib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import megatron_het
from megatron_het import megatron_patches as upstream
from megatron_het.megatron_patches import releases
from megatron_het.safe_io import LineParser, ends_with_its_reader

_IMPORT_S = 600


def patch_folder() -> Path:
    """Folder of the git patches: inside the installed package, or beside it in a checkout.

    Raises:
        FileNotFoundError: Neither folder exists.
    """
    package = Path(megatron_het.__file__).resolve().parent
    places = (package / "patches", package.parent / "patches")
    for place in places:
        if any(place.glob("*.patch")):
            return place
    raise FileNotFoundError(f"no git patches in {' or '.join(map(str, places))}: install megatron-het again")


@ends_with_its_reader
def main(arguments: Sequence[str] | None = None) -> int:
    """Print patches and the upstream names that features use; returns 1 if an upstream source has an unknown hash."""
    parser = LineParser(
        prog="python -m megatron_het.megatron_patches",
        description="The runtime patches to Megatron, each with its reason.",
    )
    parser.add_argument(
        "--patches", action="store_true", help="print the folder of the git patches for a Megatron-LM checkout"
    )
    parser.add_argument(
        "--against",
        metavar="CHECKOUT",
        type=Path,
        help="compare what is leaned on with a Megatron-LM checkout of another release: one table, and the changes",
    )
    parser.add_argument("--sources", action="store_true", help=argparse.SUPPRESS)  # of the checkout, as JSON
    options = parser.parse_args(arguments)
    if options.patches:
        print(patch_folder())
        return 0
    if options.against is not None:
        return against(options.against)
    from megatron_het import device as platform

    platform.activate()
    if options.sources:
        json.dump({dotted: _source(dotted) for dotted in whose()}, sys.stdout)
        return 0
    status = 0
    for patch in upstream.all_patches().values():
        print(f"{patch.name}  [{patch.group}, megatron-core {patch.version}]")
        print(f"  rebinds {patch.target}\n  {patch.reason}")
        status |= _compare(patch.sources)
    for name, kind, sources in leaning():
        print(f"{name}  [{kind}, megatron-core {upstream.UPSTREAM_VERSION}]")
        status |= _compare(sources)
    return status | _compare_torch()


def leaning() -> Iterator[tuple[str, str, Mapping[str, str]]]:
    """Features and model families that use upstream names: name, ``feature`` or ``model family``, hashes by name."""
    from megatron_het.families import GPT, HYBRID
    from megatron_het.features import FEATURES

    for feature in FEATURES:
        if feature.upstream_names:
            yield feature.name, "feature", feature.upstream_names
    for family in (GPT, HYBRID):
        if family.upstream_names:
            yield family.model, "model family", family.upstream_names


def whose() -> dict[str, list[str]]:
    """Every upstream name that a patch, feature or family uses, with the names of these users."""
    found: dict[str, list[str]] = {}
    for owner, sources in _owners():
        for dotted in sources:
            found.setdefault(dotted, []).append(owner)
    return dict(sorted(found.items()))


def _owners() -> Iterator[tuple[str, Mapping[str, str]]]:
    """Patches, features and families that use upstream names, with the hashes of the first release."""
    for patch in upstream.all_patches().values():
        yield f"patch {patch.name}", patch.sources
    for name, _, sources in leaning():
        yield name, sources


def _read() -> set[tuple[str, str]]:
    """Pairs of upstream name and hash, for all sources of all releases that have been read."""
    changes = [sources for _, sources in _owners()]
    for release in releases.RELEASES:
        changes += [release.changed, release.earlier]
    return {item for sources in changes for item in sources.items()}


def _source(dotted: str) -> str | None:
    """The source in its hashed form; None if upstream has no such name or source."""
    try:
        return upstream.source_text(dotted)
    except releases.PatchError:
        return None


def against(checkout: Path) -> int:
    """Print how the sources in another release's checkout differ; returns 1 if a change or the release is unread."""
    if not (checkout / "megatron" / "core").is_dir():
        sys.stderr.write(f"megatron_patches: --against {checkout}: no Megatron-LM checkout, it has no megatron/core\n")
        return 2
    try:
        other = releases.at(checkout)
        print(f"{releases.find()} against {other}\n")
        here, there = _sources_of(None), _sources_of(checkout.resolve())
    except releases.PatchError as error:
        sys.stderr.write(f"megatron_patches: {error}\n")
        return 2
    # The sources of a patch that only one of the two releases needs are compared with nothing.
    verdicts = {dotted: verdict(here[dotted], there[dotted]) for dotted in here if dotted in there}
    hashes = {dotted: upstream.text_hash(source) for dotted, source in there.items() if source is not None}
    read = _read()
    unread = {
        dotted
        for dotted, found in verdicts.items()
        if found != "unchanged" and (dotted, hashes.get(dotted)) not in read
    }
    print("| name | source there | read | whose |\n|---|---|---|---|")
    owners = whose()
    for dotted, found in sorted(verdicts.items()):
        print(f"| {dotted} | {found} | {'no' if dotted in unread else 'yes'} | {', '.join(owners[dotted])} |")
    for dotted in sorted(dotted for dotted, found in verdicts.items() if found in ("changed", "text only")):
        before, after = ((source or "").splitlines() for source in (here[dotted], there[dotted]))
        print(f"\n{dotted}  {hashes[dotted]}")
        print("\n".join(list(difflib.unified_diff(before, after, lineterm="", n=2))[2:]))
    is_known = releases.release_of(other) is not None
    if not is_known:
        print(f"\nRuns with {other} are refused until its release is among RELEASES (megatron_patches/releases.py)")
    return int(bool(unread) or not is_known)


def verdict(here: str | None, there: str | None) -> str:
    """Kind of difference of a source: ``unchanged``, ``text only`` (docstrings, layout), ``changed`` or ``gone``."""
    if there is None:
        return "gone"
    if here == there:
        return "unchanged"
    return "text only" if here is not None and _meaning(here) == _meaning(there) else "changed"


def _meaning(source: str) -> str:
    """Returns the syntax tree of a source without docstrings, as text."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and ast.get_docstring(node):
            node.body = node.body[1:]
    return ast.dump(tree)


def _sources_of(checkout: Path | None) -> dict[str, str | None]:
    """Sources by name, from a process that imports the Megatron of a checkout (None: the installed one)."""
    own = str(Path(megatron_het.__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, [str(checkout or ""), own, os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, "-W", "ignore", "-m", "megatron_het.megatron_patches", "--sources"]
    folder, environment = checkout or own, {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=_IMPORT_S, check=False
    )
    if done.returncode:
        last = "\n".join(done.stderr.splitlines()[-3:])
        raise releases.PatchError(f"the Megatron in {checkout or own} cannot be imported: {last}")
    found: dict[str, str | None] = json.loads(done.stdout[done.stdout.index("{") :])
    return found


def _compare_torch() -> bool:
    """Print the private names of torch that are used; returns whether one is different."""
    import torch

    print(f"torch  [{torch.__version__}; read in {releases.TORCH_VERSIONS[0]} to {releases.TORCH_VERSIONS[1]}]")
    for one in releases.TORCH_NAMES:
        different = releases.differences([one])
        print(f"  {one.name}: {'CHANGED, ' + different[0] if different else 'as expected'}\n    {one.reason}")
    return bool(releases.differences())


def _compare(sources: Mapping[str, str]) -> bool:
    """Print for each name whether its source has a known hash; returns whether one has not."""
    changed = upstream.moved(sources)
    for dotted in sources:
        note = f"CHANGED, now {changed[dotted]}" if dotted in changed else "as expected"
        print(f"  {dotted}: {note}")
    return bool(changed)


if __name__ == "__main__":
    sys.exit(main())
