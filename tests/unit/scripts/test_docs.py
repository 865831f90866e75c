"""The documentation points at what exists: files, headings, flags, commands and benchmarks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted(
    path.relative_to(ROOT)
    for pattern in ("*.md", "docs/*.md", "examples/**/*.md", "patches/*.md", "benchmarks/**/*.md")
    for path in ROOT.glob(pattern)
)
SOURCES = [
    path.relative_to(ROOT).as_posix()
    for folder in ("megatron_het", "tools", "benchmarks", "examples", "tests")
    for path in (ROOT / folder).rglob("*.py")
]
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_MODULE = re.compile(r"python -m ((?:megatron_het|tools|benchmarks|examples)[\w.]*)")
_TEST = re.compile(r"tests/[\w/]+\.py")
_FOLDER = re.compile(r"`((?:megatron_het|tools|examples|benchmarks|patches|docs)/[\w/]+)/?`")
_PYTHON = re.compile(r"`([\w/]+\.py)`")


def prose(page: Path) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def anchors(text: str) -> set[str]:
    """As GitHub makes them from headings."""
    found = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.replace("`", "").lower()).strip().replace(" ", "-") for h in found}


def exists(module: str) -> bool:
    path = ROOT / module.replace(".", "/")
    return path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()


def test_there_are_pages() -> None:
    assert {Path("README.md"), Path("docs/developer.md")} <= set(PAGES)


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for target in _LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (ROOT / page).parent / name if name else ROOT / page
        if not file.exists() or (anchor and anchor not in anchors(file.read_text(encoding="utf-8"))):
            broken.append(target)
    assert not broken


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_named_modules_and_files_exist(page: Path) -> None:
    """Commands, and names in backquotes: a file may be named by the end of its path, ``plan/shares.py``."""
    text = prose(page)
    modules = {name.rstrip(".") for name in _MODULE.findall(text)}
    lost = [name for name in modules if not exists(name)]
    lost += [name for name in _TEST.findall(text) if not (ROOT / name).is_file()]
    lost += [name for name in _FOLDER.findall(text) if not (ROOT / name).is_dir()]
    lost += [name for name in _PYTHON.findall(text) if name not in _OTHERS and not _ends(name)]
    assert not [name for name in lost if "NAME" not in name]  # recipes name what is still to be made


_OTHERS = {"pretrain_gpt.py", "gpt_builders.py", "model_provider.py"}  # Megatron-LM's


def _ends(name: str) -> bool:
    return any(f"/{path}".endswith(f"/{name}") for path in SOURCES)


def test_every_flag_of_the_documentation_exists() -> None:
    import argparse

    from megatron_het.launch.flags import add_het_arguments

    parser = argparse.ArgumentParser()
    add_het_arguments(parser)
    flags = {option for action in parser._actions for option in action.option_strings}
    named = {(page, flag) for page in PAGES for flag in re.findall(r"--het-[a-z-]*[a-z]", prose(page))}
    unknown = {(str(p), f) for p, f in named if f not in flags and f not in _OTHER_FLAGS and not _is_prefix(f, flags)}
    assert not unknown
    readme = {flag for page, flag in named if page == Path("README.md")}
    assert len(readme) > 8, "the table of flags is in the README"


_OTHER_FLAGS = {"--het-group"}  # srun's


def _is_prefix(flag: str, flags: set[str]) -> bool:
    """``--het-exchange-*`` names several."""
    return any(other.startswith(flag + "-") for other in flags)
