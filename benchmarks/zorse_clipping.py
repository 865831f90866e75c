"""The reference of per-ministage clipping: one process whose gradients are clipped group by group.

A group holds the parameters of one ministage of one stage.  Norm and clipping are written out here,
with whole gradients in double precision; everything else is stock Megatron's.  With a split vocabulary every
stage has rows of the embeddings in its first ministage, and of the output layer in its last one.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from pathlib import Path
from typing import Any

from megatron_het.plan import Plan
from megatron_het.plan.placement import stage_rows

Row = dict[str, Any]
Groups = list[list[int]]
"""Layers of the model by group, in the order in which a microbatch passes the ministages."""


def groups_of(plan: Plan) -> Groups:
    """Layers of every ministage, in the order in which a microbatch visits them."""
    counts = [plan.stages[stage].layers[chunk] for stage, chunk in plan.path]
    ends = list(itertools.accumulate(counts))
    return [list(range(end - count, end)) for count, end in zip(counts, ends, strict=True)]


def group_of(name: str, groups: Groups) -> int:
    """The group of a parameter of the one-process model, by its name.

    Embeddings are in the first ministage of the first stage, the final norm and the output layer in
    the last one of the last stage.
    """
    parts = name.split(".")
    if "layers" in parts:
        layer = int(parts[parts.index("layers") + 1])
        return next(g for g, layers in enumerate(groups) if layer in layers)
    return 0 if "embedding" in parts else len(groups) - 1


def rows_of(name: str, total: int, plan: Plan) -> list[tuple[int, int, int]]:
    """(group, first row, end) of a parameter's rows; with a split vocabulary every stage has its share of some.

    Args:
        name: Of the parameter in the one-process model.
        total: Its rows.
        plan: Its ministages are the groups.
    """
    is_word, is_output = name.endswith("word_embeddings.weight"), name == "output_layer.weight"
    if not plan.schedule.parameters.get("vocabulary") or not (is_word or is_output):
        return [(group_of(name, groups_of(plan)), 0, total)]
    places = [(s, 0 if is_word else len(stage.layers) - 1) for s, stage in enumerate(plan.stages)]
    ends = list(itertools.accumulate(stage_rows(plan, total)))
    return [(plan.path.index(place), start, end) for place, start, end in zip(places, [0, *ends], ends)]


def observe_clipping_groups(*, rank: int, out: str, plan: Row) -> None:
    """Setup of the reference: observe as always, and clip every group by its own norm."""
    from megatron.core.optimizer import optimizer
    from megatron.training import training

    from benchmarks.probe import observe

    observe(rank=rank, out=out, gradients=True)
    clipper = _Clipper(Plan.from_json(plan), Path(out) / "clipping.json")
    setup = training.setup_model_and_optimizer

    @functools.wraps(setup)
    def setup_model_and_optimizer(*positional: Any, **keywords: Any) -> Any:
        built = setup(*positional, **keywords)
        clipper.learn(built[0])
        return built

    training.setup_model_and_optimizer = setup_model_and_optimizer
    optimizer.clip_grad_by_total_norm_fp32 = clipper.clip


class _Clipper:
    def __init__(self, plan: Plan, path: Path) -> None:
        self._plan, self._path = plan, path
        self._members: list[list[tuple[Any, int, int]]] = [[] for _ in groups_of(plan)]
        self._clipped: list[list[bool]] = []

    def learn(self, model: Any) -> None:
        from benchmarks.probe import _named_parameters

        for name, parameter in _named_parameters(model):
            # In bf16 what is clipped are the gradients of the optimizer's copies.
            stepped = getattr(parameter, "main_param", parameter)
            for group, first, end in rows_of(name, parameter.shape[0], self._plan):
                self._members[group].append((stepped, first, end))

    def clip(self, parameters: Any, max_norm: float, *_unused: Any, **_ignored: Any) -> None:
        """In place of Megatron's clipping by the global norm."""
        missing = {id(p) for p in parameters} ^ {id(p) for members in self._members for p, _, _ in members}
        if missing:
            raise RuntimeError(f"{len(missing)} parameters are in no group, or are not clipped")
        clipped = []
        for members in self._members:
            gradients = [parameter.grad[first:end] for parameter, first, end in members]
            norm = math.sqrt(sum(gradient.double().square().sum().item() for gradient in gradients))
            factor = max_norm / (norm + 1e-6)  # the epsilon is Megatron's
            clipped.append(factor < 1)
            if factor < 1:
                for gradient in gradients:
                    gradient.mul_(factor)
        self._clipped.append(clipped)
        self._path.write_text(json.dumps(self._clipped), encoding="utf-8")
