"""What cluster file and profile promise of a plan's ranks, for the doctor to compare with what is there."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields

from megatron_het.doctor.expectations import Expectations, LayerExpectation, LayerModel, LinkExpectation
from megatron_het.doctor.links import pairs_of
from megatron_het.plan import Plan, plan_hash

from ..costs.build import rooms_of
from ..inputs.cluster import Cluster, load_cluster
from ..inputs.packing import Seat, seat_replicas
from ..inputs.profile_schema import LayerTiming, Profile, load_profile


def expectations_of_files(plan: Plan, cluster: str | os.PathLike[str], profile: str | None) -> Expectations:
    """Returns what cluster file and profile promise; see :func:`expectations`.

    Raises:
        PlannerError: A bad file, or a plan that does not fit the cluster.
    """
    return expectations(plan, load_cluster(cluster), load_profile(profile) if profile else None)


def expectations(plan: Plan, cluster: Cluster, profile: Profile | None = None) -> Expectations:
    """Links between neighbouring stages after the cluster file, layers after the profile.

    Raises:
        PlannerError: The plan does not fit the cluster.
    """
    seats = seats_of(plan, cluster)
    links = tuple(_link(first, second, seats, cluster) for first, second in pairs_of(plan))
    if profile is None:
        return Expectations(plan_hash(plan), links)
    model = profile.model
    shape = LayerModel(**{field.name: getattr(model, field.name) for field in fields(LayerModel)})
    layers = []
    for device in profile.devices:
        found = [t for t in device.timings if t.layer == "layer" and t.tp == 1 and not t.context_tokens]
        if found:
            layers.append(_layer(device.kind, min(found, key=lambda t: _distance(t, plan))))
    return Expectations(plan_hash(plan), links, tuple(layers), shape)


def seats_of(plan: Plan, cluster: Cluster) -> Mapping[int, Seat]:
    """The node of every rank, as the launch files place it."""
    seated = seat_replicas(plan, rooms_of(cluster))
    return {
        rank: seat
        for stage, replicas in zip(plan.stages, seated)
        for replica, seats in zip(stage.replicas, replicas)
        for rank, seat in zip(replica.ranks, seats)
    }


def _link(first: int, second: int, seats: Mapping[int, Seat], cluster: Cluster) -> LinkExpectation:
    """One pair of GPUs alone: what a node's network gives, at most what one GPU reaches."""
    a, b = (cluster.nodes[seats[rank].pool] for rank in (first, second))
    if seats[first].host == seats[second].host:
        rates = [node.intra_node_bytes_per_s or cluster.gpu(node.gpu).intra_node_bytes_per_s for node in (a, b)]
        return LinkExpectation(first, second, 0.0, min(rates))
    rate, latency_s, _ = cluster.link(a, b)
    streams = [node.stream_bytes_per_s for node in (a, b) if node.stream_bytes_per_s is not None]
    return LinkExpectation(first, second, latency_s, min([rate, *streams]))


def _distance(timing: LayerTiming, plan: Plan) -> tuple[int, int, bool]:
    """How far an operating point is from that of the plan."""
    training = plan.training
    return (
        abs(timing.micro_batch_size - training.micro_batch_size),
        abs(timing.slice_tokens - plan.model.seq_length),
        timing.recompute != training.recompute,
    )


def _layer(kind: str, timing: LayerTiming) -> LayerExpectation:
    return LayerExpectation(
        kind=kind,
        micro_batch_size=timing.micro_batch_size,
        tokens=timing.slice_tokens,
        recompute=timing.recompute,
        forward_s=timing.forward_s,
        backward_s=timing.backward_s,
    )
