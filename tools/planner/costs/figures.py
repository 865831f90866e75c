"""What the operations of a plan's features take on every device, for the simulation of its real program."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_het.features.base import Figures

from .candidate import Candidate, Group
from .estimate import Estimator, Unit
from .estimates import rank_parameters
from .extras import attention_layers

Device = tuple[int, Group, Unit]
"""(stage, kind of replica, its figures)"""


def figures_of(estimator: Estimator, whole: Candidate, devices: Sequence[Device]) -> Figures:
    """Figures per device.

    Args:
        estimator: Prices links and layers.
        whole: Decides over whom parameters are gathered and gradients reduced.
        devices: Of the program.
    """
    model, batch = estimator.model, whole.micro_batch_size
    element = float(model.element_bytes)
    gathers: list[float] = []
    reduces: list[float] = []
    for s, stage in enumerate(whole.stages):
        units = [estimator.unit_of(whole, g, s) for g in stage.groups]
        counts = [rank_parameters(whole, u, s) for u in units if u is not None]
        ranks = whole.reducing(s)
        for out, bytes_each in ((gathers, element), (reduces, 4.0)):
            size = {g: n * bytes_each for g, n in zip(ranks, counts, strict=True)}
            out.append(estimator.network.sync_s(ranks, size, 0.5))
    # Replicas of one TP size share a copy of the state.
    shards = [
        {g.tp: sum(x.count for x in ranks if x.tp == g.tp) for g in ranks}
        for ranks in (whole.reducing(s) for s in range(len(whole.stages)))
    ]
    host = [estimator.cluster.gpu(estimator.cluster.nodes[g.pool].gpu).host_bytes_per_s for _, g, _ in devices]
    # Figures of a layer are not measured apart from its attention: by operations, causal attention once.
    length = model.seq_length
    share = 1 - model.layer_flops(length, 0) / model.layer_flops(length)
    attending = [attention_layers(model, whole, s) for s in range(len(whole.stages))]
    if model.kinds:  # of a layer with attention, and not of the mean of all
        share *= model.num_layers / max(1, sum(attending))
    means = [estimator.unit_of(whole, g) if model.kinds else u for _, g, u in devices]
    tokens = float(batch * length) / whole.cp
    return Figures(
        gather_s=tuple(gathers[s] for s, _, _ in devices),
        reduce_s=tuple(reduces[s] for s, _, _ in devices),
        host_copy_s=tuple(
            rank_parameters(whole, u, s) * element / shards[s][g.tp] / speed
            for (s, g, u), speed in zip(devices, host, strict=True)
        ),
        host_bytes_per_s=tuple(host),
        embedding_forward_s=tuple(u.embedding_f for _, _, u in devices),
        embedding_backward_s=tuple(u.embedding_b for _, _, u in devices),
        head_forward_s=tuple(u.head_f for _, _, u in devices),
        head_backward_s=tuple(u.head_b for _, _, u in devices),
        head_bytes=tuple(u.head_bytes for _, _, u in devices),
        attention_forward_s=tuple(share * u.layer_f for u in means if u is not None),
        attention_backward_s=tuple(share * u.layer_b for u in means if u is not None),
        kv_bytes=tuple(2 * tokens * model.kv_size / g.tp * element for _, g, _ in devices),
        query_bytes=tuple(2 * tokens * model.hidden_size / g.tp * element for _, g, _ in devices),
    )
