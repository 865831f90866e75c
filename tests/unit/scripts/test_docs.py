"""The documentation points at what exists: files, headings, flags, commands and benchmarks."""

import importlib
import re
from operator import attrgetter
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted(
    path.relative_to(ROOT)
    for pattern in ("*.md", "docs/*.md", "examples/**/*.md", "patches/*.md", "benchmarks/**/*.md", "test*/*.md")
    for path in ROOT.glob(pattern)
)
SOURCES = [
    path.relative_to(ROOT).as_posix()
    for folder in ("megatron_het", "tools", "benchmarks", "examples", "scripts", "testing", "tests")
    for path in (ROOT / folder).rglob("*.py")
] + ["setup.py"]
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
    """Commands, and names in backquotes: a file may be named by the end of its path, ``plan/placement.py``."""
    text = prose(page)
    modules = {name.rstrip(".") for name in _MODULE.findall(text)}
    lost = [name for name in modules if not exists(name)]
    lost += [name for name in _TEST.findall(text) if not (ROOT / name).is_file()]
    lost += [name for name in _FOLDER.findall(text) if not (ROOT / name).is_dir()]
    named = [name for name in _PYTHON.findall(text) if name not in _OTHERS]
    lost += [name for name in named if not any(f"/{path}".endswith(f"/{name}") for path in SOURCES)]
    assert not [name for name in lost if "NAME" not in name]  # recipes name what is still to be made


_OTHERS = {"pretrain_gpt.py", "gpt_builders.py", "model_provider.py"}  # Megatron-LM's


def test_every_flag_of_the_documentation_exists() -> None:
    import argparse

    from megatron_het.arguments.flags import add_het_arguments

    parser = argparse.ArgumentParser()
    add_het_arguments(parser)
    flags = {option for action in parser._actions for option in action.option_strings}
    named = {(page, flag) for page in PAGES for flag in re.findall(r"--het-[a-z-]*[a-z]", prose(page))}
    unknown = {(str(p), f) for p, f in named if f not in flags and f not in _OTHER_FLAGS}
    # ``--het-exchange-*`` names several.
    assert not {(p, f) for p, f in unknown if not any(other.startswith(f + "-") for other in flags)}
    readme = {flag for page, flag in named if page == Path("README.md")}
    assert 0 < len(readme) <= 8, "the README has the most important flags only; docs/flags.md has all"


def test_the_readme_is_short_and_says_how_to_contribute() -> None:
    text = prose(Path("README.md"))
    assert len(text.splitlines()) <= 150
    assert {"CONTRIBUTING.md", "docs/index.md", "docs/tutorial.md"} <= set(_LINK.findall(text))


def test_what_is_new_is_told_in_few_lines() -> None:
    """One or two lines for a change; the page that it links says the rest."""
    unreleased = prose(Path("CHANGELOG.md")).split("## [Unreleased]")[1].split("\n## [")[0]
    assert len(unreleased.splitlines()) <= 60


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent == Path("docs")], ids=str)
def test_a_page_says_for_whom_it_is_and_the_index_has_it(page: Path) -> None:
    title, empty, first = prose(page).splitlines()[:3]
    assert title.startswith("# ") and not empty and first.startswith("For "), "the first line says for whom the page is"
    index = {target.split("#")[0] for target in _LINK.findall(prose(Path("docs/index.md")))}
    assert page.name in index | {"index.md"}, "docs/index.md says when to read it"


def test_the_page_of_flags_is_up_to_date() -> None:
    from scripts.make_docs import PAGE, flags_page

    assert PAGE.read_text(encoding="utf-8") == flags_page(), "run 'make docs'"


def test_every_cluster_has_its_plan_and_an_opinion_about_it() -> None:
    """Ten sections of a screen, made of the files beside the command; no opinion is about an earlier plan."""
    from scripts.make_plans import CASES, PAGE, cluster_in_words, sections_of

    sections = sections_of(PAGE.read_text(encoding="utf-8"))
    cases = yaml.safe_load(CASES.read_text(encoding="utf-8"))
    assert list(sections) == list(range(1, len(cases) + 1)) and len(cases) == 10
    for text, case in zip(sections.values(), cases, strict=True):
        assert case["title"] in text.splitlines()[0] and cluster_in_words(case) in text
        assert f"```text\n{case['view_of']}\n```" in text and case["view"].strip() in text
        assert len(text.splitlines()) <= 40


def test_refused_combinations_are_told_with_their_reason() -> None:
    from benchmarks.combinations import markdown
    from testing.combination_cases import features

    page = prose(Path("docs/combinations.md"))
    reason = "--het-x = True: they cannot. Leave one out"
    made = markdown({(("tp", "by stage"), ("tied", True)): reason, (("cp", 2), ("tied", True)): reason})
    assert "| tied | tp: by stage, cp: 2 | they cannot. |" in made
    tables = made.split("## Features of some schedules only")[1]
    assert page.endswith(tables), "python -m benchmarks.combinations --check --json OUT --markdown docs/combinations.md"
    assert max(line.count("|") for line in page.splitlines()) <= 4 and str(len(features())) in page


_OTHER_FLAGS = {"--het-group"}  # srun's


_COMMAND = re.compile(r"(?<![-\w])(?:het-plan|python -m tools\.planner) +([a-z][a-z-]*)([^`\n]*)")


def options_of(words: str) -> set[str]:
    """The options of a command line: without comments, quoted texts, and what another program gets."""
    own = re.split(r" -- | \| | > | # ", re.sub(r"\"[^\"]*\"|'[^']*'", "TEXT", words))[0]
    return set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", own))


@pytest.mark.parametrize("page", [page for page in PAGES if "benchmarks" not in page.parts], ids=str)
def test_commands_of_the_planner_have_the_options_that_are_told(page: Path) -> None:
    from tools.planner.__main__ import COMMANDS, parser_of

    for name, words in _COMMAND.findall(prose(page).replace("\\\n", " ")):
        if name in COMMANDS:
            known = {option for action in parser_of(name)._actions for option in action.option_strings}
            assert options_of(words) <= known, f"het-plan {name}{words}"
    for block in re.findall(r"^```(?:bash)?\n(.*?)^```$", prose(page), re.MULTILINE | re.DOTALL):
        unknown = re.findall(r"^(?:het-plan|python -m tools\.planner) +(\w+)", block, re.MULTILINE)
        assert set(unknown) <= {name.split("-")[0] for name in COMMANDS} | set(COMMANDS), block


def blocks(page: str, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", prose(Path(page)), re.MULTILINE | re.DOTALL)


def test_the_plan_in_the_readme_is_a_plan(tmp_path: Path) -> None:
    from megatron_het.features.registry import check_plan_alone
    from megatron_het.plan import load_plan

    (plan,) = blocks("README.md", "json")
    (tmp_path / "plan.json").write_text(plan)
    check_plan_alone(load_plan(tmp_path / "plan.json"))


@pytest.mark.parametrize("page", ["docs/planner.md", "docs/old_gpus.md"])
def test_cluster_files_in_the_documentation_are_cluster_files(page: str) -> None:
    from megatron_het.safe_io import parse_yaml
    from tools.planner.inputs.cluster import cluster_from_document

    found = blocks(page, "yaml")
    assert found
    for text in found:
        document = {"name": "lab", **parse_yaml(text, page)}
        assert cluster_from_document(document, page).nodes


def test_the_constants_of_the_search_are_those_of_the_code():
    rows = re.findall(r"^\| (`[^|]+`) \(`(\w+)\.py`\) \| ([^|]+) \|", prose(Path("docs/search.md")), re.MULTILINE)
    for names, module, values in rows:
        found = importlib.import_module(f"tools.planner.search.{module}")
        code = [attrgetter(name)(found) for name in re.findall(r"`([\w.]+)`", names)]
        assert code == [float(value.replace(",", "")) for value in values.split(", ")], names
    assert len(rows) >= 10
