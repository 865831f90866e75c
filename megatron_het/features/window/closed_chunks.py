"""The distributed optimizer over ministages that are closed already (``features/window/window.py``).

Upstream takes the main parameters of all chunks out of their whole parameters at once.  Here a chunk
is whole only while its own are taken, so that a stage need not fit into the device's memory.  Buffers
of no window are left to upstream.
"""

from __future__ import annotations

import contextlib
from typing import Any


def chunk_by_chunk(original: type) -> type:
    """The distributed optimizer that builds its main parameters chunk by chunk."""
    from megatron_het.features.window.chunk import window_of

    class ChunkwiseDistributedOptimizer(original):
        """``DistributedOptimizer`` whose constructor opens one ministage at a time."""

        def _build_model_and_main_param_groups(
            self,
            gbuf_ranges: list[Any],
            param_gbuf_map: dict[Any, Any],
            opt_group_ranges: list[dict[str, Any]],
            config: Any,
        ) -> tuple[list[list[Any]], ...]:
            build = super()._build_model_and_main_param_groups
            windows = [window_of(buffer) for buffer in self.buffers]
            if not any(windows):
                return build(gbuf_ranges, param_gbuf_map, opt_group_ranges, config)
            # Upstream's groups list parameters in the order of the buffers, hence of the chunks.
            merged: list[list[list[Any]]] = []
            optimized: list[list[Any]] = [[] for _ in opt_group_ranges]
            for window in dict.fromkeys(windows):
                part: list[dict[str, Any]] = [
                    {
                        "params": [p for p in group["params"] if windows[param_gbuf_map[p][0]] is window],
                        "orig_group": {},
                    }
                    for group in opt_group_ranges
                ]
                with contextlib.nullcontext() if window is None else window.lent():
                    found = build(gbuf_ranges, param_gbuf_map, part, config)
                merged = merged or [[[] for _ in opt_group_ranges] for _ in found]
                for kinds, groups in zip(merged, found, strict=True):
                    for members, more in zip(kinds, groups, strict=True):
                        members.extend(more)
                for members, group in zip(optimized, part, strict=True):
                    members.extend(group["orig_group"]["params"])
            for group, members in zip(opt_group_ranges, optimized, strict=True):
                group["orig_group"]["params"] = members
            return tuple(merged)

    ChunkwiseDistributedOptimizer.__qualname__ = original.__qualname__
    return ChunkwiseDistributedOptimizer
