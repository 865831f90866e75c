"""Looks into runs on packed documents: where documents begin, and what key-value caches take."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from benchmarks import slimpipe_probe


def watch(*, rank: int, out: str) -> None:
    """As ``slimpipe_probe.watch`` for times; writes ``packed-<rank>.json`` besides.

    Args:
        rank: This rank.
        out: Folder of both files.  The second has the ``documents`` of every microbatch of every iteration, and
            ``pool_bytes`` of all layers after the last one.
    """
    from megatron_het.features.documents.runtime import DocumentStarts
    from megatron_het.runtime.session import HetSession

    slimpipe_probe.watch(rank=rank, out=out)
    found: dict[str, Any] = {"documents": [], "pool_bytes": 0}
    exchange, step = DocumentStarts.exchange, HetSession.forward_backward

    @functools.wraps(exchange)
    def noted(self: DocumentStarts, microbatches: int, *more: Any) -> None:
        exchange(self, microbatches, *more)
        found["documents"].append([self.of(m) for m in range(microbatches)])

    @functools.wraps(step)
    def watched(self: HetSession, **keywords: Any) -> Any:
        result = step(self, **keywords)
        found["pool_bytes"] = slimpipe_probe.pool_bytes(keywords["model"])
        (Path(out) / f"packed-{rank}.json").write_text(json.dumps(found), encoding="utf-8")
        return result

    DocumentStarts.exchange = noted  # type: ignore[method-assign, assignment]
    HetSession.forward_backward = watched  # type: ignore[method-assign]
