"""In how many places each feature of the product is known; the definition is in ``benchmarks.structure``."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.structure_sources import PRODUCT, Finding, Module, imports_of

MAX_PLACES = 8


@dataclass(frozen=True, slots=True)
class Feature:
    """Where a feature lives and what only it is called.

    Attributes:
        home: Modules and packages of its own, as dotted names; those that do not exist are passed over.
        words: A pattern of its identifiers in lower case with underscores, ``ExchangePlan`` as ``exchange_plan``.
        parameters: Likewise of plan parameters that are a common noun, which variables have for something else: the
            ``window`` of a model's attention or of a measurement, the number of words in a ``vocabulary``.  They
            count where parameters are written, in strings.
    """

    home: tuple[str, ...]
    words: str
    parameters: str = ""


FEATURES = {
    "context exchange": Feature(
        (
            "megatron_het.features.context_exchange.spec",
            "megatron_het.features.context_exchange",
            "megatron_het.features.context_exchange.helper",
            "megatron_het.features.context_exchange.helper",
            "megatron_het.schedule.exchange",
            "megatron_het.schedule.leveling",
            "megatron_het.features.context_exchange.passes",
        ),
        r"(het_)?context_exchange|exchange_(units|keep|idle|plan|attention|rest)|add_exchange|kv_(send|recv)"
        r"|attend_(give|help|merge)(_backward)?",
    ),
    "split vocabulary": Feature(
        (
            "megatron_het.features.vocab_parallel.spec",
            "megatron_het.features.vocab_parallel",
            "megatron_het.features.vocab_parallel.passes",
            "megatron_het.features.vocab_parallel.passes",
        ),
        r"(het_)?vocabulary_parallel|splits_vocabulary|vocab_(forward|backward)|embed_(forward|backward)",
        r"vocabulary",
    ),
    "parameter window": Feature(
        (
            "megatron_het.features.window.spec",
            "megatron_het.features.window",
            "megatron_het.features.window.passes",
            "megatron_het.features.window.passes",
        ),
        r"(het_|parameter_|het_parameter_)window|(het_)?offload_(parameters|optimizer)|het_update|window_options"
        r"|param_(prefetch|gather|release|offload)|grad_reduce|optimizer_step",
        r"window",
    ),
    "activation offload": Feature(
        (
            "megatron_het.features.activation_offload.spec",
            "megatron_het.features.activation_offload",
            "megatron_het.features.activation_offload.passes",
        ),
        r"(het_)?offload_activations|activation_offload|act_(offload|fetch)",
    ),
    "slices": Feature(
        (
            "megatron_het.features.slices.spec",
            "megatron_het.features.slices",
            "megatron_het.plan.slices",
            "megatron_het.schedule.generators.slimpipe",
        ),
        r"het_slices|slimpipe|is_sliced|slices_of",
    ),
    "packed documents": Feature(
        (
            "megatron_het.features.documents.spec",
            "megatron_het.features.documents.runtime",
            "megatron_het.features.documents.runtime",
        ),
        r"document_starts|asked_by|(dataloader_)?inter_document_masking|reset_attention_mask",
    ),
    "context parallelism": Feature(
        ("megatron_het.features.context_parallel.spec", "megatron_het.features.context_parallel"),
        r"context_parallel(_size|_ranks)?|cp_size",
    ),
    "Lion in shards": Feature(
        ("megatron_het.features.optimizers.spec", "megatron_het.features.optimizers"),
        r"(het_)?sharded_lion|lion_(steps|beside_adam)",
    ),
    "zero bubble": Feature(
        (
            "megatron_het.features.zero_bubble.spec",
            "megatron_het.features.zero_bubble",
            "megatron_het.schedule.generators.zero_bubble",
        ),
        r"zero_bubble|zb_(h1|v)|v_half|backward_(input|weight)",
    ),
}


def modules_per_feature(modules: Sequence[Module], features: Mapping[str, Feature] = FEATURES) -> Finding:
    """For every feature its home (one) and the modules of the product outside of it that know it."""
    product = [m for m in modules if m.name.split(".")[0] in PRODUCT]
    words = {m.name: list(_words(m)) for m in product}
    counts, offenders = {}, []
    for name, feature in features.items():
        pattern, in_strings = re.compile(feature.words), re.compile(feature.parameters or r"(?!)")
        home = {m.name for m in product if any(m.name == h or m.name.startswith(h + ".") for h in feature.home)}
        known = {m.name for m in product}
        places = []
        for m in product:
            if m.name in home:
                continue
            imported = [(node, other) for other, node in imports_of(m, known).items() if other in home]
            named = [
                (node, word)
                for node, word in words[m.name]
                if pattern.fullmatch(word) or (isinstance(node, ast.Constant) and in_strings.fullmatch(word))
            ]
            hits = imported or named
            if hits:
                places.append(f"  {m.at(hits[0][0])} {'imports' if imported else 'names'} {hits[0][1]}")
        counts[name] = len(places) + bool(home)
        if counts[name] > MAX_PLACES:
            offenders += [f"{name}: {counts[name]} places, its home ({len(home)} modules) and", *places]
    return Finding(counts, offenders)


def _words(module: Module) -> Iterator[tuple[ast.AST, str]]:
    """Identifiers, and strings that are not docstrings, in lower case with underscores."""
    docstrings = set()
    for node in module.nodes:
        body = getattr(node, "body", None)
        if isinstance(body, list):  # a string that stands alone explains what comes before or after
            docstrings |= {id(s.value) for s in body if isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant)}
    for node in module.nodes:
        for text in _texts(node, docstrings):
            yield node, _snake(text)


def _texts(node: ast.AST, docstrings: set[int]) -> Iterator[str]:
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, ast.arg) or (isinstance(node, ast.keyword) and node.arg):
        yield str(node.arg)
    elif isinstance(node, ast.alias):
        yield node.name.rpartition(".")[2]
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
        yield from re.findall(r"-*\w[\w-]*", node.value) if "--" in node.value else (node.value,)


def _snake(text: str) -> str:
    """``ExchangePlan``, ``--exchange-plan`` and ``EXCHANGE_PLAN`` as ``exchange_plan``."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", text).lower().replace("-", "_").strip("_")
