"""What a worker does before it says that it is ready: what the first session would do once is done then.

The others wait for a newcomer's first session as for anybody's, so whatever it does for the first time in a change is a
part of the pause.
"""

from __future__ import annotations

import argparse
import ast
import functools
import importlib
import inspect
from typing import Any

MODULES = (
    "megatron.training",
    "megatron.training.argument_utils",
    "megatron.training.inprocess_restart",
    "megatron.core.models.mimo",
    "megatron.core.tokenizers.text.libraries",
    "megatron.core.datasets.blended_megatron_dataset_builder",
    "megatron.training.datasets.fim_dataset",
    "megatron.training.datasets.sft_dataset",
    "megatron.core.dist_checkpointing.strategies.torch",
    "megatron_het.pretrain_gpt",
    "megatron_het.launch.start",
    "megatron_het.runtime.training",
    "megatron_het.checkpoint.loading",
    "torch.utils.tensorboard",
)
"""What a session imports, now or when it needs it; without starting anything."""


_CONFIGURATION = "@dataclass"
"""What the source of a configuration class begins with."""


def warm_up() -> None:
    """Import, read and compare what every session needs; the process has its platform already."""
    from megatron_het import megatron_patches as upstream

    upstream.install("stock")
    for name in MODULES:
        importlib.import_module(name)
    remember_sources()
    for patch in upstream.all_patches().values():
        upstream.changed_sources(patch)
    from megatron.training.arguments import add_megatron_arguments

    add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))


def remember_sources() -> None:
    """Find and parse the source of a configuration class once in the life of this process.

    Megatron makes the help of its flags from the sources of its configuration classes, each time that it parses a
    command line, and finding one means to parse the whole file.
    """
    if hasattr(inspect.getsource, "cache_info"):
        return
    found: Any = functools.cache(inspect.getsource)
    inspect.getsource = found
    parse, trees = ast.parse, dict[str, ast.Module]()

    @functools.wraps(parse)
    def parse_once(source: Any, *positional: Any, **keywords: Any) -> Any:
        """The tree of a configuration class is only looked at."""
        if positional or keywords or not isinstance(source, str) or not source.startswith(_CONFIGURATION):
            return parse(source, *positional, **keywords)
        if source not in trees:
            trees[source] = parse(source)
        return trees[source]

    ast.parse = parse_once
