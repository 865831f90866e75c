"""Writes what is derived from ``requirements/constraints.txt``: ``python scripts/requirements.py lock | list``.

``lock`` writes ``requirements/hashes.txt``: the same versions with the digests of all their files, as the package index
has them; it needs ``uv`` on the path and the network.  ``list`` writes ``requirements/README.md``: every package, and
what asks for it, as the packages that are installed beside this interpreter say.  ``--check`` writes nothing, and exits
with 1 where ``list`` would write something else.
"""

import argparse
import ast
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS, HASHES, LIST = (ROOT / "requirements" / name for name in ("constraints.txt", "hashes.txt", "README.md"))
_GROUPS = {"RUNTIME": "training", "PLANNER": "planner", "TEST": "tests", "LINT": "lint", "OPTIMIZERS": "Lion and Muon"}
_LINUX = re.compile(r"^((?:nvidia-|cuda-|triton|emerging-optimizers)[^ ]*)( \\)?$", re.MULTILINE)
_HEAD = """# Every file that `make venv` may install: the versions of constraints.txt with digests.
# Written by `make requirements`.
"""


def normalised(name: str) -> str:
    """The one spelling of a package's name."""
    return re.sub(r"[-_.]+", "-", re.split(r"[<>=!~;\[ (]", name.strip())[0]).lower()


def pinned(file: Path) -> dict[str, str]:
    """Versions by name, of a list of requirements with digests or without."""
    rows = re.findall(r"^([A-Za-z0-9][^=\s]*)==([^\s;\\]+)", file.read_text(encoding="utf-8"), re.MULTILINE)
    return {normalised(name): version for name, version in rows}


def asked() -> dict[str, list[str]]:
    """Names of the packages that ``setup.py`` requires, by purpose."""
    lists = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in ast.parse((ROOT / "setup.py").read_text(encoding="utf-8")).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.List)
    }
    return {why: [normalised(row) for row in lists[name]] for name, why in _GROUPS.items()}


def lock() -> None:
    """Write the digests."""
    command = ["uv", "pip", "compile", "--no-deps", "--generate-hashes", "--no-header", "--no-annotate", "--quiet"]
    done = subprocess.run(
        [*command, "--no-config", "--native-tls", "--python-version", "3.12", str(CONSTRAINTS)],
        capture_output=True,
        text=True,
        check=True,
    )
    HASHES.write_text(_HEAD + _LINUX.sub(r"\1 ; sys_platform == 'linux'\2", done.stdout), encoding="utf-8")


def listed() -> str:
    """The list as a page.

    Raises:
        PackageNotFoundError: A pinned package is not installed here.
    """
    versions = pinned(CONSTRAINTS)
    why: dict[str, set[str]] = {name: set() for name in versions}
    extras: dict[str, set[str]] = {name: set() for name in versions}
    for group, names in asked().items():
        for name in names:
            why[name].add(f"**{group}**")
    for name in versions:
        for row in metadata.requires(name) or []:
            needed, _, marker = row.partition(";")
            if normalised(needed) in why:
                (extras if "extra ==" in marker else why)[normalised(needed)].add(name)
    why["setuptools"].add("**to install this package**")
    rows = []
    for name, version in sorted(versions.items()):
        found = metadata.metadata(name)
        said = " ".join((found.get("Summary") or "").split()).replace("|", "/")[:100]
        rows.append(f"| {name} | {version} | {', '.join(sorted(why[name] or extras[name]))} | {said} |")
    return "\n".join(
        [
            "# What `make venv` installs, and why",
            "",
            "Written by `make requirements`. Versions are in `constraints.txt`, digests in `hashes.txt`. In bold is",
            "what this project asks for. The others are asked for by the packages that are named.",
            "",
            "| package | version | asked for by | what it is |",
            "|---|---|---|---|",
            *rows,
            "",
        ]
    )


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("lock", "list"))
    parser.add_argument("--check", action="store_true", help="only compare the list")
    options = parser.parse_args()
    if options.what == "lock":
        lock()
        return 0
    text = listed()
    if options.check:
        return int(text != LIST.read_text(encoding="utf-8"))
    LIST.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
