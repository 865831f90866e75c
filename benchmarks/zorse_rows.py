"""What the cases of the ministage schedule are made from (``zorse_cases.py``)."""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]

# Every row: stages x ranks per stage, TP, ministages, options of the window.
ROWS: tuple[tuple[tuple[int, ...], int, int, dict[str, Any]], ...] = (
    ((1,), 1, 2, {}),
    ((2,), 1, 4, {}),
    ((3,), 1, 3, {"prefetch": 0}),
    ((4,), 1, 2, {"keep_at_turn": False}),
    ((2, 1), 1, 1, {}),
    ((2, 1), 1, 2, {"offload": True}),
    ((1, 3), 1, 4, {"per_layer": False}),
    ((2, 2), 1, 2, {"prefetch": 2}),
    ((1, 2), 2, 2, {}),
    ((2, 2), 1, 4, {"per_microbatch": True, "keep_at_turn": False}),
    ((1, 2, 1), 1, 2, {"offload": True, "per_layer": False}),
    ((2, 1, 1), 1, 2, {"keep_at_turn": False}),
    ((1, 1, 2, 1), 1, 2, {}),
    ((2, 2, 2, 2), 1, 1, {"offload": True, "keep_at_turn": False}),
    ((2, 2), 1, 2, {"update": "at-once"}),
    ((3,), 1, 4, {"update": "at-once", "offload": True}),
    ((1, 2), 2, 1, {"update": "at-once", "prefetch": 0}),
)
CLIP_SOME = 1.0
CLIPS = (1.0, 0.05)  # the second one is below every norm of these models
NO_WINDOW = (((1, 2), 1, 2), ((2,), 1, 3), ((1, 1, 1), 1, 2))
MORE: tuple[Row, ...] = (
    {"replicas": (2, 2), "ministages": 2, "window": {"update": "undo"}, "clip": 0.05},
    {"replicas": (3,), "ministages": 4, "window": {"update": "undo", "offload": True}, "clip": 1.0},
    {
        "replicas": (1, 2),
        "tp": 2,
        "ministages": 2,
        "window": {"update": "undo", "offload_optimizer": True},
        "clip": 0.05,
    },
    # One ministage in one stage: its norm is the global one.
    {"replicas": (4,), "ministages": 1, "window": {"update": "per-ministage"}, "clip": 0.05},
    {"replicas": (2, 1), "ministages": 2, "window": {"update": "per-ministage"}, "clip": 100.0},
    {"replicas": (2, 1), "ministages": 2, "window": {"offload": True, "offload_optimizer": True}, "clip": 1.0},
    {"replicas": (3,), "ministages": 2, "window": {"update": "at-once", "offload_optimizer": True}, "clip": 0.0},
    # Two microbatches in four stages.
    {"replicas": (1, 1, 1, 1), "ministages": 1, "window": {"offload": True}, "clip": 1.0, "micro_batch_size": 3},
    {"replicas": (2, 1, 1), "ministages": 2, "window": {}, "clip": 1.0, "micro_batch_size": 3},
    {
        "replicas": (2, 1),
        "ministages": 2,
        "window": {"update": "undo", "offload_optimizer": True},
        "clip": 0.05,
        "precision": "bf16",
    },
    {"replicas": (2, 1), "ministages": 2, "window": {"offload": True, "offload_activations": 1.0}, "clip": 1.0},
    {
        "replicas": (1, 2),
        "tp": 2,
        "ministages": 2,
        "window": {"offload_activations": 0.5},
        "clip": 1.0,
        "recompute": "none",
    },
    {"replicas": (2,), "ministages": 3, "window": {"update": "undo", "offload_activations": 1.0}, "clip": 0.05},
    # Unequal shares of a stage's state.
    {"replicas": (2, 1), "ministages": 2, "window": {}, "clip": 0.05, "shares": ((3, 1), (1,))},
    {
        "replicas": (3,),
        "ministages": 4,
        "window": {"offload": True, "offload_optimizer": True},
        "clip": 1.0,
        "shares": ((0, 2, 1),),
    },
    {"replicas": (4,), "ministages": 2, "window": {"update": "undo"}, "clip": 0.05, "shares": ((4, 2, 0, 1),)},
    {
        "replicas": (1, 2),
        "tp": 2,
        "ministages": 2,
        "window": {"keep_at_turn": False},
        "clip": 0.05,
        "shares": ((1,), (1, 2.5)),
    },
    {
        "replicas": (2, 2),
        "ministages": 4,
        "window": {"update": "at-once", "offload": True},
        "clip": 0.0,
        "shares": ((1, 0), (1, 5)),
    },
    {"replicas": (4,), "ministages": 1, "window": {"update": "per-ministage"}, "clip": 0.05, "shares": ((1, 2, 3, 4),)},
    {
        "replicas": (2, 2),
        "ministages": 2,
        "window": {"per_microbatch": True, "per_layer": False},
        "clip": 1.0,
        "shares": ((2, 1), (1, 0)),
    },
    {
        "replicas": (2, 1),
        "ministages": 2,
        "window": {"update": "undo", "offload_optimizer": True},
        "clip": 0.05,
        "precision": "bf16",
        "shares": ((0, 1), (1,)),
    },
    {
        "replicas": (1, 3),
        "ministages": 2,
        "window": {"offload": True},
        "clip": 1.0,
        "precision": "bf16",
        "shares": ((1,), (1, 3, 2)),
    },
    # Several: against one process that clips group by group; this bound is below some of the norms only.
    {"replicas": (2, 1), "ministages": 2, "window": {"update": "per-ministage"}, "clip": CLIP_SOME},
    {"replicas": (3,), "ministages": 3, "window": {"update": "per-ministage", "offload": True}, "clip": 0.05},
    {
        "replicas": (1, 2),
        "tp": 2,
        "ministages": 2,
        "window": {"update": "per-ministage", "offload_optimizer": True},
        "clip": CLIP_SOME,
    },
    # A split vocabulary: every stage has rows in its first and its last ministage.
    {
        "replicas": (2, 1),
        "ministages": 2,
        "window": {"vocabulary": True, "update": "undo", "offload": True},
        "clip": 0.05,
    },
    {
        "replicas": (1, 2),
        "tp": 2,
        "ministages": 3,
        "window": {"vocabulary": True, "prefetch": 0},
        "clip": 1.0,
        "shares": ((1,), (2, 1)),
    },
    {
        "replicas": (1, 2, 1),
        "ministages": 2,
        "window": {"vocabulary": True, "vocabulary_shares": [1, 4, 2], "update": "at-once", "prefetch": 2},
        "clip": 0.0,
        "recompute": "none",
    },
    {
        "replicas": (2, 1),
        "ministages": 2,
        "window": {"vocabulary": True, "update": "per-ministage", "offload_optimizer": True},
        "clip": CLIP_SOME,
    },
    # Tied embeddings: copies in the first and the last ministage, updated last; or every row once.
    {"replicas": (2, 1), "tied": True, "ministages": 2, "window": {"update": "undo", "offload": True}, "clip": 0.05},
    {"replicas": (1, 2), "tp": 2, "tied": True, "ministages": 2, "window": {"update": "at-once"}, "clip": 0.0},
    {
        "replicas": (2, 1),
        "tied": True,
        "ministages": 1,
        "window": {"vocabulary": True, "update": "per-ministage"},
        "clip": 0.05,
    },
    # Both copies on the ranks of the first stage, or of the only one.
    {"replicas": (2, 1), "tied": True, "layers": ((2, 1), (2,)), "window": {"offload": True}, "clip": 0.05},
    {"replicas": (2, 1), "tied": True, "layers": ((2, 1), (2,)), "window": {"update": "at-once"}, "clip": 0.0},
    {"replicas": (2,), "tied": True, "ministages": 3, "window": {"update": "undo"}, "clip": 0.05, "shares": ((3, 1),)},
)
