"""Makes ``docs/plans.md``: ten clusters, the plan that the planner chooses, why, and an opinion written by hand.

    python -m scripts.make_plans [--only 1,4]

Clusters, models and opinions are in ``plans.yaml`` beside this file.  ``--only`` renews some clusters and keeps the
text of the others.
"""

import argparse
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from tools.planner.__main__ import parser_of
from tools.planner.report.analysis import alternatives, best_even_split, binding, row_of, simulated
from tools.planner.report.tables import NOTATION, bound_lines, describe, summary
from tools.planner.search.methods import search
from tools.planner.search.outcome import Goal, estimator_from

ROOT = Path(__file__).resolve().parents[1]
PAGE, CASES = ROOT / "docs" / "plans.md", Path(__file__).with_name("plans.yaml")
OTHERS = 2  # plans of other kinds that are shown
HEAD = f"""\
# Ten clusters and their plans

For whoever wants to know what the planner does before using it, and whether a person would do the same.
`python -m scripts.make_plans` makes this page from `scripts/plans.yaml`, which has the cluster and model files.
Figures are predictions without a profile ([costs.md](costs.md)). Nothing here was run. "What an expert would say" is an
opinion, written by hand beside the figures.

```text
{NOTATION}
```
"""


def main() -> int:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="N,N", help="numbers of clusters to renew; the others keep their text")
    options = parser.parse_args()
    cases = yaml.safe_load(CASES.read_text(encoding="utf-8"))
    wanted = {int(n) for n in options.only.split(",")} if options.only else set(range(1, len(cases) + 1))
    for number, case in enumerate(cases, 1):
        if number in wanted:
            found = {number: section(number, case)}
            before = sections_of(PAGE.read_text(encoding="utf-8")) if PAGE.exists() else {}
            texts = [text for _, text in sorted((before | found).items())]
            PAGE.write_text("\n".join([HEAD, *texts]), encoding="utf-8")
            sys.stderr.write(f"{number}: {case['title']}\n")
    return 0


def sections_of(page: str) -> dict[int, str]:
    """The sections of a page by number."""
    parts = re.split(r"^(?=## \d+\. )", page, flags=re.MULTILINE)[1:]
    return {int(re.findall(r"\d+", part)[0]): part.rstrip("\n") + "\n" for part in parts}


def section(number: int, case: dict[str, Any]) -> str:
    """Plan a cluster, and write what there is to say."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        for name in ("cluster", "model"):
            (folder / f"{name}.yaml").write_text(yaml.safe_dump(case[name]), encoding="utf-8")
        words = ["--cluster", str(folder / "cluster.yaml"), "--model", str(folder / "model.yaml")]
        estimator = estimator_from(parser_of("plan").parse_args(words))
    goal = Goal()
    outcome = search("auto", estimator, goal)
    best = outcome.best
    assert best is not None, case["title"]
    plan = describe(estimator, best.candidate)
    body = summary(estimator, best.candidate, best.estimate, best.simulated_s)
    figures = [f"{body['iteration_s']:.4g} s per iteration", f"{body['tokens_per_s']:,.0f} tokens/s"]
    figures += [f"MFU {100 * body['model_flops_utilisation']:.0f} %", f"+-{100 * body['uncertainty']:.0f} %"]
    even = best_even_split(estimator)
    others = [row_of(estimator, "the best plan of stock Megatron", simulated(estimator, *even), best)] if even else []
    kinds = [node.gpu for node in estimator.cluster.nodes]
    for kind in dict.fromkeys(kinds):
        alone = [f for f in outcome.found if {kinds[pool] for pool in f.candidate.gpus()} == {kind}]
        if alone and {kinds[pool] for pool in best.candidate.gpus()} != {kind}:
            others.append(row_of(estimator, f"{kind} only", min(alone, key=lambda f: f.iteration_s), best))
    others += alternatives(estimator, outcome, best, OTHERS)
    bounds = bound_lines(outcome, goal)
    off = "; ".join(text for text in bounds if text.startswith("if ") and "less than" not in text)
    why = [*binding(estimator, goal, best), *(text for text in bounds if not text.startswith("if "))]
    why += [*([off] if off else []), *map(_other, others)]
    view = case.get("view", "").strip()
    if view and case.get("view_of") != plan:
        view += f"\n\n(Written about an earlier plan: `{case.get('view_of')}`.)"
    lines = [
        f"## {number}. {case['title']}",
        "",
        cluster_in_words(case),
        "",
        "```text",
        plan,
        "```",
        "",
        ", ".join(figures) + ".",
    ]
    lines += ["", "Why:", "", *(f"- {text[:1].upper()}{text[1:]}." for text in why)]
    return "\n".join([*lines, "", "What an expert would say:", "", view, ""])


def cluster_in_words(case: dict[str, Any]) -> str:
    """The cluster and the model in two sentences."""
    nodes = [
        f"{n['count']} node{'s' * (n['count'] > 1)} of {n['gpus_per_node']} {n['gpu']}"
        + (f" in {n['zone']}" if "zone" in n else "")
        + f" ({8 * float(n['network_bytes_per_s']) / 1e9:g} Gbit/s)"
        for n in case["cluster"]["nodes"]
    ]
    links = [f"{8 * float(k['bytes_per_s']) / 1e9:g} Gbit/s between regions" for k in case["cluster"].get("links", ())]
    model = case["model"]
    text = f"{model['name']}, {model['seq_length']:,} tokens, global batch {model['global_batch_size']}"
    return f"{'; '.join([*nodes, *links])}. {text}."


def _other(row: dict[str, Any]) -> str:
    """Another plan beside the best one."""
    if row["iteration_s"] is None:
        return f"{row['what']}: no plan"
    return f"{row['what']}: {row['iteration_s']:.4g} s, {row['ratio']:.2f} times as long: `{row['plan']}`"


if __name__ == "__main__":
    sys.exit(main())
