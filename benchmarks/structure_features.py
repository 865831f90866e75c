"""Counts the files that a reader opens for each feature of the product, as ``benchmarks.structure`` defines it."""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import Enum, Flag
from pathlib import Path

import megatron_het.features  # noqa: F401  (features add their kinds to the table)
from megatron_het.schedule.kinds import Columns, Kind

# The sources that ``benchmarks.structure`` reads: modules, their imports and names.


PRODUCT = ("megatron_het", "tools", "examples")
FOLDERS = (*PRODUCT, "benchmarks", "tests", "testing")


@dataclass(slots=True)
class Module:
    """One source file: its dotted name, its lines, how many of them are comments, and its syntax tree."""

    name: str
    path: str
    lines: int
    comments: int
    tree: ast.Module
    package: bool
    nodes: list[ast.AST] = field(default_factory=list)

    def at(self, node: ast.AST) -> str:
        """Returns ``file:line`` of a node."""
        return f"{self.path}:{getattr(node, 'lineno', 1)}"


Target = int | Mapping[str, int]  # the most that a figure may be; for a figure with names, of each of them or by name


@dataclass(slots=True)
class Finding:
    """The figure of one key and the places that make it."""

    value: float | dict[str, int]
    offenders: list[str]

    def missed(self, target: Target) -> bool:
        """Whether a figure is above its target; names without a target never are."""
        values = self.value if isinstance(self.value, dict) else {"": self.value}
        return any(
            value > (target.get(name, value) if isinstance(target, Mapping) else target)
            for name, value in values.items()
        )


def read_tree(root: Path, folders: Sequence[str] = FOLDERS) -> list[Module]:
    """Returns the modules under ``root``, by path.

    Raises:
        ValueError: A file cannot be parsed, or there is none.
    """
    modules = []
    for path in sorted(p for folder in folders for p in (root / folder).rglob("*.py")):
        relative = path.relative_to(root)
        text = path.read_text(encoding="utf-8")
        try:
            tree = ast.parse(text)
        except SyntaxError as error:
            raise ValueError(f"{relative}:{error.lineno}: {error.msg}") from error
        parts = relative.with_suffix("").parts
        package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if package else parts)
        modules.append(
            Module(
                name=name,
                path=str(relative),
                lines=len(text.splitlines()),
                comments=sum(line.lstrip().startswith("#") for line in text.splitlines()),
                tree=tree,
                package=package,
                nodes=list(ast.walk(tree)),
            )
        )
    if not modules:
        raise ValueError(f"no Python file under {', '.join(folders)} of {root}: give --root the top of a checkout")
    return modules


def imports_of(module: Module, known: Iterable[str]) -> dict[str, ast.AST]:
    """Returns the modules of ``known`` that ``module`` imports anywhere, each with the first such statement.

    ``from a import b`` is an import of ``a.b`` where that is a module, else of ``a``.
    """
    found: dict[str, ast.AST] = {}
    names = known if isinstance(known, (set, frozenset, dict)) else set(known)
    for node in module.nodes:
        if isinstance(node, ast.Import):
            wanted = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = _base(module, node)
            wanted = [f"{base}.{a.name}" if f"{base}.{a.name}" in names else base for a in node.names]
        else:
            continue
        for name in wanted:
            if name in names and name != module.name:
                found.setdefault(name, node)
    return found


def _base(module: Module, node: ast.ImportFrom) -> str:
    """Returns the absolute name at which a ``from`` import starts."""
    if not node.level:
        return node.module or ""
    parts = module.name.split(".")
    kept = parts[: len(parts) - node.level + (1 if module.package else 0)]
    return ".".join([*kept, *([node.module] if node.module else [])])


def dotted(node: ast.AST) -> str | None:
    """Returns ``a.b.c`` as text; None for nodes that are not made of names."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value) or ''}.{node.attr}"
    return None


MAX_FILES, MAX_OUTSIDE = 12, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """The package and the own identifiers of a feature."""

    room: str  # its package, as a dotted name
    words: str  # a pattern of its identifiers in lower case with underscores, ``ExchangePlan`` as ``exchange_plan``
    # A pattern of plan parameters that are a common noun, which variables have for something else: the ``window`` of a
    # model's attention or of a measurement, the number of words in a ``vocabulary``.  They count where parameters are
    # written, in strings.
    parameters: str = ""
    # who executes its kinds in the table of kinds; the entries of the table's columns that only these kinds have are
    # identifiers too
    executor: str = ""
    elsewhere: tuple[str, ...] = ()  # modules and packages of its own that lie in other rooms


FEATURES = {
    "context exchange": Feature(
        room="megatron_het.features.context_exchange",
        words=r"(het_)?context_exchange|exchange_(units|keep|idle|plan|attention|rest)|add_exchange|kv_(send|recv)"
        r"|attend_(give|help|merge)(_backward)?",
        executor="context_exchange",
    ),
    "split vocabulary": Feature(
        room="megatron_het.features.vocab_parallel",
        words=r"(het_)?vocabulary_parallel|splits_vocabulary|vocab_(forward|backward)|embed_(forward|backward)",
        parameters=r"vocabulary",
        executor="vocabulary",
    ),
    "parameter window": Feature(
        room="megatron_het.features.window",
        words=r"(het_|parameter_|het_parameter_)window|(het_)?offload_(parameters|optimizer)|het_update|window_options"
        r"|param_(prefetch|gather|release|offload)|grad_reduce|optimizer_step",
        parameters=r"window",
        executor="window",
    ),
    "activation offload": Feature(
        room="megatron_het.features.activation_offload",
        words=r"(het_)?offload_activations|activation_offload|act_(offload|fetch)",
        executor="activation_offload",
    ),
    "slices": Feature(
        room="megatron_het.features.slices", words=r"het_slices|slimpipe|is_sliced|slices_of|slice_keys_per_token"
    ),
    "packed documents": Feature(
        room="megatron_het.features.documents",
        words=r"document_starts|asked_by|(dataloader_)?inter_document_masking|reset_attention_mask",
    ),
    "context parallelism": Feature(
        room="megatron_het.features.context_parallel", words=r"context_parallel(_size|_ranks)?|cp_size"
    ),
    "optimizers": Feature(
        room="megatron_het.features.optimizers", words=r"(het_)?sharded_lion|lion_(steps|beside_adam)"
    ),
    "zero bubble": Feature(
        room="megatron_het.features.zero_bubble",
        words=r"zero_bubble|zb_(h1|v)|v_half|backward_(input|weight)",
        executor="zero_bubble",
    ),
    "experts": Feature(room="megatron_het.features.experts", words=r"experts_options|global_aux_loss"),
    "multi-token prediction": Feature(room="megatron_het.features.mtp", words=r"mtp_(num_layers|loss_scaling_factor)"),
    "initial weights": Feature(room="megatron_het.features.initial_weights", words=r"initial_weights|het_init"),
    "thrifty layers": Feature(room="megatron_het.features.thrifty_layers", words=r"(het_)?thrifty_(layers|options)"),
    "CUDA graphs of layers": Feature(room="megatron_het.features.layer_graphs", words=r"layer_graphs(_options)?"),
    "watch": Feature(room="megatron_het.features.watch", words=r"het_watch|watch_(options|threshold)"),
}


def files_for_a_feature(
    modules: Sequence[Module], features: Mapping[str, Feature] = FEATURES
) -> tuple[Finding, Finding]:
    """Counts the files that a reader opens for every feature: inside and outside of its package, and outside alone."""
    product = [m for m in modules if m.name.split(".")[0] in PRODUCT]
    known = {m.name for m in product}
    words = {m.name: list(_words(m)) for m in product}
    entries = _entries_of_executors()
    everything, outside, offenders = {}, {}, []
    for name, feature in features.items():
        room = [m for m in product if _is_in(m, feature.room) and not m.package]
        places = []
        for m in product:
            if _is_in(m, feature.room):
                continue
            own = any(_is_in(m, other) for other in feature.elsewhere)
            hit = (m.nodes[0], "its own module") if own else _hit(m, known, words[m.name], feature, entries)
            if hit:
                places.append(f"  {m.at(hit[0])} {hit[1]}")
        everything[name], outside[name] = len(room) + len(places), len(places)
        if everything[name] > MAX_FILES or outside[name] > MAX_OUTSIDE:
            offenders += [f"{name}: {len(room)} files in its room, and", *places]
    return Finding(everything, offenders), Finding(outside, offenders)


def _is_in(module: Module, home: str) -> bool:
    return module.name == home or module.name.startswith(home + ".")


def _hit(
    module: Module,
    known: Set[str],
    words: Sequence[tuple[ast.AST, str]],
    feature: Feature,
    entries: Mapping[str, Set[str]],
) -> tuple[ast.AST, str] | None:
    """Returns the first place where a module imports a feature or names one of its identifiers, with a description."""
    for other, node in imports_of(module, known).items():
        if any(other == home or other.startswith(home + ".") for home in (feature.room, *feature.elsewhere)):
            return node, f"imports {other}"
    pattern, in_strings = re.compile(feature.words), re.compile(feature.parameters or r"(?!)")
    is_table = module.name == Columns.__module__  # the file with the entries of all features
    columns = frozenset() if is_table else entries.get(feature.executor, frozenset())
    for node, word in words:
        if pattern.fullmatch(word) or (isinstance(node, ast.Constant) and in_strings.fullmatch(word)):
            return node, f"names {word}"
        if isinstance(node, ast.Attribute) and dotted(node) in columns:
            return node, f"names {dotted(node)}"
    return None


def _entries_of_executors() -> dict[str, set[str]]:
    """Returns names and column entries that only one executor's kinds have: ``Kind.KV_SEND``, ``Price.PREFETCH``."""
    owners: dict[str, set[str]] = {}
    for kind in Kind:
        for column in Columns.__annotations__:
            entry = getattr(kind, column)
            parts = entry if isinstance(entry, Flag) else (entry,)  # also a price of the whole backward
            for part in parts:
                if isinstance(part, Enum):
                    owners.setdefault(f"{type(part).__name__}.{part.name}", set()).add(kind.executor)
        owners[f"Kind.{kind.name}"] = {kind.executor}
    entries: dict[str, set[str]] = {}
    for entry, executors in owners.items():
        if len(executors) == 1:
            entries.setdefault(executors.pop(), set()).add(entry)
    return entries


def _words(module: Module) -> Iterator[tuple[ast.AST, str]]:
    """Yields identifiers, and strings that are not docstrings, in lower case with underscores."""
    docstrings = set()
    for node in module.nodes:
        body = getattr(node, "body", None)
        if isinstance(body, list):  # a string statement documents the code before or after it
            docstrings |= {id(s.value) for s in body if isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant)}
    for node in module.nodes:
        for text in _texts(node, docstrings):
            # ``ExchangePlan``, ``--exchange-plan`` and ``EXCHANGE_PLAN`` as ``exchange_plan``.
            yield node, re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", text).lower().replace("-", "_").strip("_")


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
