"""1F1B, interleaved and V-shaped pipelines, and SlimPipe, whose pipelines run slices of sequences."""

import functools
from collections.abc import Iterator, Sequence
from ctypes import c_double
from math import ceil, lcm
from types import SimpleNamespace

from megatron_het.features import attention_units
from megatron_het.features.registry import cutting_of
from megatron_het.features.slices.spec import WORK
from megatron_het.plan import Plan
from megatron_het.plan.schema import SPARSE_ATTENTION
from megatron_het.schedule.cutting import Cutting, Parts, SlicePart

from ...inputs.model import Model
from ...inputs.model_parts import Lengths, drawn
from ..candidate import MEETING, Candidate, Estimate, Line, Pipeline, StageTimes, chunk_layers, divided_alike
from ..operating import OperatingPoints
from ..plain import MOST_STAGES, figures_of, loops, row_of
from ..unit import Unit
from .base import Place, Schedule

# Interleaved 1F1B: several chunks per stage, in groups of as many microbatches as there are stages.


CHUNKS = (2, 3, 4, 6, 8, 12, 16)


class Interleaved(Schedule):
    """Megatron's virtual stages."""

    name = "interleaved"
    is_stock = True
    needs_equal_widths = True
    fills_by_stages = True

    def runs(self, estimator: OperatingPoints, candidate: Candidate) -> bool:
        """Several stages, and microbatches in whole groups, in the plan and in each of its blocks."""
        if len(candidate.stages) == 1:
            return False  # chunks of a single stage follow each other as its layers do
        total = estimator.model.global_batch_size // candidate.micro_batch_size
        return total % (len(candidate.stages) * candidate.blocks) == 0

    def variants(self, estimator: OperatingPoints, plain: Candidate) -> Iterator[Candidate]:
        """Candidates with several numbers of chunks."""
        alike = len({sum(g.count for g in s.groups) for s in plain.stages}) == 1
        if len(plain.stages) < 2 or not alike or not self.runs(estimator, plain):
            return
        least = min(s.layers for s in plain.stages)
        for chunks in (n for n in CHUNKS if n <= least):
            yield plain.with_(schedule=self.name, chunks=chunks)

    def waits_s(
        self, estimator: OperatingPoints, candidate: Candidate, stages: Sequence[StageTimes], ways: Sequence[float]
    ) -> float:
        """A group of fewer microbatches than stages takes as long as a whole one, too."""
        lacking_s = [-stage.microbatches[0] % len(stages) * (stage.forward_s + stage.backward_s) for stage in stages]
        return super().waits_s(estimator, candidate, stages, ways) + max(lacking_s)

    def in_flight(self, candidate: Candidate, stage: StageTimes, s: int, i: int) -> float:
        """SlimPipe, Table 2; the first chunks, which are held longest, may have more layers."""
        count, mine = len(candidate.stages), stage.microbatches[i]
        if not candidate.chunk_counts:
            return _in_flight(count, count - 1 - s, candidate.chunks, candidate.stages[s].layers, mine)
        passes = 2 * (count - 1 - s) + (candidate.chunks - 1) * count + 1
        return min(float(mine), passes / candidate.chunks_of(s))

    def expected_in_flight(self, like: Candidate, place: Place) -> float:
        """SlimPipe, Table 2."""
        v = like.chunks
        return min(place.microbatches, (2 * place.after + (v - 1) * place.stages + 1) / v)

    def in_flight_with(self, like: Candidate, place: Place, layers: int) -> float:
        """More of them where the first chunks have the odd layers."""
        return _in_flight(place.stages, place.after, like.chunks, layers, ceil(place.microbatches))


@functools.lru_cache(maxsize=4096)
def _in_flight(stages: int, after: int, chunks: int, layers: int, microbatches: int) -> float:
    """Microbatches in flight on a stage with so many after it, as activations of all its layers."""
    passes, parts = 2 * after + (chunks - 1) * stages + 1, chunk_layers(layers, chunks)
    if len(set(parts)) == 1:
        return min(float(microbatches), passes / chunks)
    # Groups of microbatches go through chunk by chunk, so many forwards ahead of the backwards, with the one that runs.
    forward = [n for _ in range(min(3, -(-microbatches // stages))) for n in parts for _ in range(stages)]
    backward, passes = forward[::-1], min(passes, len(forward))
    most = max(sum(forward[: passes + j]) - sum(backward[:j]) for j in range(len(forward) - passes + 1))
    return most / layers


MISMATCH_WITH_SLACK = (0.01, 0.003, 0.0, 0.03)


class OneFOneB(Schedule):
    """One forward, one backward."""

    name = "1f1b"
    is_stock = True
    has_slack = True
    has_depths = True

    def mismatch(self, candidate: Candidate) -> tuple[float, float, float, float]:
        """Less is lost where more microbatches are in flight."""
        return MISMATCH_WITH_SLACK if candidate.slack > 0 else super().mismatch(candidate)

    def waits_s(
        self, estimator: OperatingPoints, candidate: Candidate, stages: Sequence[StageTimes], ways: Sequence[float]
    ) -> float:
        """Seconds in which stages that meet for the output layer of every microbatch wait for each other.

        Between two meetings a stage begins with a backward for which the stage before waits, or ends with a forward
        that has come from two stages before.  Neither is so where a stage holds two microbatches more than the next.
        """
        meets = set(candidate.depths) == {MEETING} and divided_alike(candidate, [s.microbatches for s in stages])
        if not candidate.rows or len(stages) == 1 or meets:
            return 0.0
        units, layers = [stage.units[0] for stage in stages], [stage.layers for stage in candidate.stages]
        forward = [unit.layer_f * n for unit, n in zip(units, layers)]
        backward = [unit.layer_b * n for unit, n in zip(units, layers)]
        pairs = zip(ways, forward, forward[1:], backward, backward[1:])
        apart_s = max([max(b + way + b2, f + f2 + max(f, f2) + 2 * way) for way, f, f2, b, b2 in pairs])
        if len(stages) % 3 == 0:  # embeddings of the next microbatch fall between the same two meetings
            apart_s += forward[0]
        ends_s = max([unit.ends_s(*candidate.ends_of(s)) for s, unit in enumerate(units)])
        least_s = max([f + b for f, b in zip(forward, backward)])
        most = max([stage.microbatches[0] for stage in stages])
        least_s = max([least_s, max(self.loops_s(candidate, stages, ways)) / most - ends_s])
        return (most - 1) * max(0.0, apart_s - least_s)

    def vocabulary_loss_s(self, like: Candidate, unit: Unit, stages: int, layers: float) -> float:
        """Returns what the meetings of stages take longer than a forward and a backward of each."""
        return layers * max(unit.layer_b - unit.layer_f, unit.layer_f)

    def ends(self, estimator: OperatingPoints, candidate: Candidate, line: Line, found: Pipeline) -> Sequence[float]:
        """A later stage ends earlier by the backwards that the stage before it still holds."""
        if estimator.runtime.transfers_in_turn:
            return super().ends(estimator, candidate, line, found)
        compiled, (stages, transfers, _) = loops(), line
        if compiled is not None and len(stages) <= MOST_STAGES:
            out, figures = (c_double * len(stages))(), figures_of(stages)
            compiled.het_ends(len(stages), figures, row_of(transfers), found.end_s, row_of(found.earliest), out)
            return out[:]
        ends, before, ahead = [], 0.0, 0.0
        for s, stage in enumerate(stages):
            if s:
                ahead = max(before, ahead + _lead(stages[s - 1], stage, transfers[s - 1]))
            ends.append(max(found.end_s - ahead, found.earliest[s]) if s else found.end_s - before)
            before += stage.backward_s + (transfers[s] if s < len(transfers) else 0.0)
        return ends

    def parameters(self, candidate: Candidate, estimate: Estimate, alike: bool) -> dict[str, object]:
        """Depths, where links are slow, and slack, where stages do not route the microbatches in the same way."""
        found = super().parameters(candidate, estimate, alike)
        if not found and not alike:
            found = {"slack": 0.0 if divided_alike(candidate, estimate.microbatches) else candidate.slack}
        return {**found, "depths": list(candidate.depths)} if candidate.depths else found


def _lead(earlier: StageTimes, stage: StageTimes, transfer_s: float) -> float:
    """How long before the earlier stage a stage can end: the backwards it holds, less its last round trip."""
    left = min([min(held, k) * b for held, k, b in zip(earlier.in_flight, earlier.microbatches, earlier.replica_b)])
    return left - max([f + b for f, b in zip(stage.replica_f, stage.replica_b)]) - 2 * transfer_s


LEAST_TOKENS = 256  # shorter slices are not worth their launches, unless the slices of several sequences are one pass
LEAST_TOKENS_OF_PASS = 1024
EVENED = 0.45
"""With one slice per stage, the share of such waiting that long backwards beside short forwards take back: fitted to
simulated pipelines of 2 to 8 stages."""
LEAST_TOKENS_CHANGED = 1024  # slices of plans that have been found are not made shorter


class SlimPipe(Schedule):
    """Slices of a sequence take turns, so that a stage holds little more than one microbatch."""

    name = "slimpipe"
    cuts_sequences = True
    fills_by_stages = True

    def runs(self, estimator: OperatingPoints, candidate: Candidate) -> bool:
        """There are slices for all stages, of tokens that TP ranks share, and heads suit the attention kernels.

        Slices that do not divide the sequence differ by as many tokens as ranks share.
        """
        model, cluster, slices = estimator.model, estimator.cluster, candidate.slices
        if slices < len(candidate.stages) or SPARSE_ATTENTION in model.pattern:
            return False
        tps = {g.tp for s in candidate.stages for g in s.groups} if model.sequence_parallel else ()
        unit = lcm(*tps)
        if model.seq_length % unit or model.seq_length // unit < slices:
            return False
        return model.head_dim % 8 == 0 or all(cluster.gpu(cluster.nodes[p].gpu).is_processor for p in candidate.gpus())

    def variants(self, estimator: OperatingPoints, plain: Candidate) -> Iterator[Candidate]:
        """Candidates with several numbers of slices; the smallest also for short slices of large microbatches."""
        count, length = len(plain.stages), estimator.model.seq_length
        wanted = [n for n in (count, 2 * count, 4 * count) if length // n >= LEAST_TOKENS]
        if not wanted and length // count * plain.micro_batch_size >= LEAST_TOKENS_OF_PASS:
            wanted = [count]
        # Or a few more that divide the sequence: equal slices are simulated in less time.
        tried = [next((n for n in range(k, 2 * k) if length % n == 0), k) for k in wanted if count > 1]
        for slices in dict.fromkeys(tried):
            yield plain.with_(schedule=self.name, slices=slices)

    def changes(self, estimator: OperatingPoints, candidate: Candidate) -> Iterator[Candidate]:
        """More and fewer slices and chunks, and the context exchange."""
        c, length, count = candidate, estimator.model.seq_length, len(candidate.stages)
        for slices in (c.slices * 2, c.slices // 2):
            if slices >= count and length // slices >= LEAST_TOKENS_CHANGED * c.cp:
                yield c.with_(slices=slices)
        for chunks in (c.chunks + 1, c.chunks - 1):
            if 1 <= chunks <= min(s.layers for s in c.stages) and (chunks == 1 or c.slices % count == 0):
                yield c.with_(chunks=chunks)
        yield c.with_(exchange=not c.exchange)

    def in_flight(self, candidate: Candidate, stage: StageTimes, s: int, i: int) -> float:
        """SlimPipe, equation (1)."""
        cut = candidate.slices * candidate.chunks_of(s)
        return min(float(stage.microbatches[i]), (cut + 2 * (len(candidate.stages) - 1 - s)) / cut)

    def expected_in_flight(self, like: Candidate, place: Place) -> float:
        """SlimPipe, equation (1)."""
        return min(place.microbatches, 1.0 + 2 * place.after / (like.slices * like.chunks))

    def waits_s(
        self, estimator: OperatingPoints, candidate: Candidate, stages: Sequence[StageTimes], ways: Sequence[float]
    ) -> float:
        """Where all stages meet for the output layer, messages show as long as passes go one way only.

        A pass comes to the last stage after as many passes of the first one as there are stages, and meets it there.
        """
        found = super().waits_s(estimator, candidate, stages, ways)
        return found + 2 * sum(ways) * candidate.slices / len(stages) if candidate.rows else found

    def loops_s(self, candidate: Candidate, stages: Sequence[StageTimes], ways: Sequence[float]) -> list[float]:
        """Returns no less than a stage takes that meets all others for the output layer of every slice."""
        found = super().loops_s(candidate, stages, ways)
        if not candidate.rows:
            return found
        lost = [
            self.vocabulary_loss_s(candidate, stage.units[0], len(stages), its.layers)
            for stage, its in zip(stages, candidate.stages)
        ]
        own = [stage.microbatches[0] * (stage.forward_s + stage.backward_s + t) for stage, t in zip(stages, lost)]
        return [max(loop_s, t) for loop_s, t in zip(found, own)]

    def vocabulary_loss_s(self, like: Candidate, unit: Unit, stages: int, layers: float) -> float:
        """Stages that meet for every slice wait for the one whose slice attends to the most keys."""
        if like.exchange:
            return 0.0
        n, wrapped = like.slices, min(stages, like.slices) - 1
        longest = sum(slice_ + 0.5 for slice_ in range(wrapped, n)) + wrapped * (n - 0.5)
        attention_s = layers * (unit.attention_f + unit.attention_b)
        return attention_s * (longest / (n * n / 2) - 1) * (1 - EVENED * (wrapped + 1) / n)

    def layer_share(self, unit: Unit) -> float:
        """Attention by slices keeps no attention matrices."""
        return unit.sliced_share

    def logits(self, candidate: Candidate, held: float, head_bytes: float, is_alone: bool = False) -> float:
        """Returns the bytes of all slices: the last stage runs them all before its first backward, the last one's.

        Most is held in that backward: at its loss, or under full recomputation in its layers, where its own logits are
        used up and all keys and values have gradients.  With further microbatches the next one's slices come then.
        """
        used = 1 / candidate.slices if candidate.recompute == "full" and is_alone else 0.0
        return min(held, 1.0) * head_bytes * (1 - used)

    def head_workspace(self, candidate: Candidate, unit: Unit) -> float:
        """Under full recomputation that of the layers, beside which the slice's logits are not there any more."""
        if candidate.recompute == "full":
            return max(unit.workspace_bytes, unit.head_workspace_bytes)
        return super().head_workspace(candidate, unit)

    def parameters(self, candidate: Candidate, estimate: Estimate, alike: bool) -> dict[str, object]:
        """The number of slices."""
        return {"slices": candidate.slices} | super().parameters(candidate, estimate, alike)

    def cut(self, estimator: OperatingPoints, candidate: Candidate) -> dict[str, object]:
        """Slices of equal work where documents share sequences; the context exchange evens out equal ones as well."""
        if candidate.slices == 1 or candidate.exchange or estimator.model.document_lengths is None:
            return super().cut(estimator, candidate)
        lengths = {"slice_lengths": WORK, "slice_keys_per_token": _keys_per_token(estimator, candidate)}
        return lengths | super().cut(estimator, candidate)

    def slice_parts(self, model: Model, plan: Plan) -> Parts:
        """Parts of slices by the model's documents and the plan's cuts; empty for equal slices without documents."""
        if model.document_lengths is None and cutting_of(plan).is_even:
            return ()
        cutting, units = cutting_of(plan, _arguments(model)), attention_units(plan)
        found, at = [], 0
        for microbatch in range(plan.training.num_microbatches):
            size = plan.training.sequences(microbatch)
            found.append(_parts(cutting, units, model.document_lengths, at, size))
            at += size
        return tuple(found)


@functools.lru_cache(maxsize=4096)
def _parts(cutting: Cutting, units: int, lengths: Lengths | None, at: int, size: int) -> tuple[SlicePart, ...]:
    """Returns the parts of one microbatch, which has ``size`` sequences from the ``at``-th on."""
    if lengths is None:
        return cutting.parts(None, units)
    sequences = drawn(lengths, cutting.length)
    return cutting.parts([sequences[(at + i) % len(sequences)] for i in range(size)], units)


def _keys_per_token(estimator: OperatingPoints, candidate: Candidate) -> float:
    """Keys that a query attends to in the time that the rest of a layer takes, in the mean of all replicas."""
    model, rest, attention = estimator.model, 0.0, 0.0
    for s, stage in enumerate(candidate.stages):
        for g in stage.groups:
            u = estimator.unit_of(candidate, g, s)
            assert u is not None
            own = u.attention_f + u.attention_b
            rest += g.count * (u.layer_f + u.layer_b - own)
            attention += g.count * own
    keys = model.seq_length / 2 * model.attention_share  # of a query, in the mean
    return float(f"{max(rest / attention * keys, 1.0):.3g}")


def _arguments(model: Model) -> SimpleNamespace:
    """Returns what of Megatron's arguments decides what slices see, and how long those of equal work are."""
    x, window, period = model.experts, model.attention_window, model.window_period
    return SimpleNamespace(
        hidden_size=model.hidden_size,
        kv_channels=model.head_dim,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.groups,
        group_query_attention=True,
        num_layers=model.num_layers,
        swiglu=model.gated,
        ffn_hidden_size=model.ffn_hidden_size,
        num_experts=x.count if x else None,
        moe_router_topk=x.top_k if x else 0,
        moe_ffn_hidden_size=x.ffn_hidden_size if x else None,
        moe_shared_expert_intermediate_size=x.shared_ffn_hidden_size if x else None,
        window_size=None if window is None else (window - 1, 0),
        window_attn_skip_freq=period or None,
    )
