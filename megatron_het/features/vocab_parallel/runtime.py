"""The runtime half of the split vocabulary."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from megatron_het.features.vocab_parallel import layers
from megatron_het.lowering.ranks import RankOp
from megatron_het.runtime import feature
from megatron_het.schedule.ir import Kind

# The output layer, its loss and the embeddings, run by all devices that a microbatch visits (SlimPipe, section 4.3).
#
# Per slice, with ``[s, b, h]`` hidden states from the last stage:
#
# =================  ======================================================================================
# VOCAB_FORWARD      the last stage sends hidden states and labels; every rank computes its part of the
#                    logits and sends three numbers per token back
# VOCAB_BACKWARD     the last stage merges them, calls the training script's loss function, and sends two
#                    numbers per token; every rank computes its part of the gradients of the hidden states
#                    and sends it back
# BACKWARD           the last stage sums these and continues as any other stage
# =================  ======================================================================================
#
# The forward of the last stage therefore ends with its hidden states, and its loss is known when the
# vocabulary's backward runs (in evaluation: at the end).  These messages have groups of their own, one per
# directed pair; ``layers.py`` has senders and receivers, and the embeddings.  With context parallelism the ranks of
# every part of the sequence hold the whole vocabulary together.  No message waits
# for more than the operation's dependencies (``schedule/deps.py``), so that a valid program cannot be blocked
# by these messages.


# Cross entropy from logits that are split over the vocabulary (SlimPipe, section 4.3.2).
#
# Every rank reduces its part of the logits to three numbers per token: the largest logit, the sum of
# the exponentials relative to it, and the target's logit where the rank has it.  Merging these of all
# parts gives the loss; the log-sum-exp and the loss's gradient, two numbers per token, sent back, give
# every rank the gradient of its logits.  All of it in fp32.

STATISTICS = 3  # rows of a part's statistics: maximum, sum of exponentials relative to it, target logit (0 elsewhere)


class ShardLogits:
    """One rank's part of the logits of a slice, from forward to backward.

    Args:
        logits: ``[s, b, rows]``, detached; overwritten when they are fp32 already.
        labels: Target ids ``[s, b]``.
        first: Vocabulary id of the first row.
    """

    def __init__(self, logits: torch.Tensor, labels: torch.Tensor, first: int) -> None:
        rows = logits.shape[-1]
        self._here = (labels >= first) & (labels < first + rows)
        self._index = torch.where(self._here, labels - first, 0).unsqueeze(-1)
        wide = logits.float()
        target = wide.gather(-1, self._index).squeeze(-1) * self._here
        self._maximum = wide.amax(dim=-1)
        self._exponentials = wide.sub_(self._maximum.unsqueeze(-1)).exp_()
        self.statistics = torch.stack((self._maximum, self._exponentials.sum(dim=-1), target))

    def gradient(self, log_sum: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """Gradient of this part's logits; overwrites them.

        Args:
            log_sum: Log-sum-exp over the whole vocabulary, ``[s, b]``.
            grad: Gradient of the token losses, ``[s, b]``.

        Returns:
            ``[s, b, rows]`` in fp32: (softmax - one-hot) times ``grad``.
        """
        scale = (self._maximum - log_sum).exp_().mul_(grad)
        found = self._exponentials.mul_(scale.unsqueeze(-1))
        return found.scatter_add_(-1, self._index, -(grad * self._here).unsqueeze(-1))


def merge(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Statistics ``[3, s, b]`` of the union of disjoint parts of the vocabulary, from those of the parts."""
    stacked = torch.stack(tuple(parts))
    maximum = stacked[:, 0].amax(dim=0)
    total = (stacked[:, 1] * (stacked[:, 0] - maximum).exp()).sum(dim=0)
    return torch.stack((maximum, total, stacked[:, 2].sum(dim=0)))


def log_sum_exp(statistics: torch.Tensor) -> torch.Tensor:
    """Log-sum-exp over the vocabulary that statistics ``[3, s, b]`` describe: ``[s, b]``."""
    return statistics[0] + statistics[1].log()


def token_losses(statistics: torch.Tensor) -> torch.Tensor:
    """Losses ``[s, b]`` of the tokens, from statistics of the whole vocabulary."""
    return log_sum_exp(statistics) - statistics[2]


Slice = tuple[int, int]  # (microbatch, slice)


@dataclass(slots=True)
class _Work:
    """State of one slice between its two vocabulary operations."""

    hidden: torch.Tensor
    logits: torch.Tensor
    shard: ShardLogits
    arriving: list[layers.Arriving] = field(default_factory=list)
    loss_func: Callable[..., Any] | None = None


class SplitVocabulary(feature.RuntimeFeature):
    """One rank's part of embeddings, output layer and loss, which are separate operations.

    Args:
        context: Opens channels, which is collective.
    """

    def __init__(self, context: feature.OpenContext) -> None:
        self._chunks, self._attached = len(context.lowered[False].backwards), 0
        self._last_chunk = self._chunks - 1 if context.has_loss else -1
        placement, tokens = context.placement, context.boundaries.tokens
        self._placement, self._rank, self._tp_group = placement, context.rank, context.groups["tp"]
        self._timeline = context.timeline
        self._team = layers.Team(placement, context.rank, tokens, context.batches)
        self._last_stage = placement.last[0]
        self._divided = placement.plan.training.sequence_parallel  # hidden states and their gradients
        self._is_last = self._team.where.stage == self._last_stage
        pairs = layers.edges(placement, self._last_stage, tokens, divided=self._divided)
        self._channels = context.new_channels("output layer", pairs, layers.PENDING_SENDS)
        self._embedding = layers.EmbeddingTeam(self._team, context)
        self._layer: layers.SplitOutputLayer | None = None
        self._tied_weight: torch.nn.Parameter | None = None
        self._labels: torch.Tensor | None = None
        self._output_dtype = torch.float32
        self._loss_func: Callable[..., Any] | None = None
        self._ready: dict[Slice, tuple[torch.Tensor, torch.Tensor, Callable[..., Any]]] = {}
        self._work: dict[Slice, _Work] = {}
        self._gradients: dict[Slice, tuple[torch.Tensor, list[layers.Arriving]]] = {}

    # -- the model -------------------------------------------------------------------------------

    def attach(self, models: Sequence[torch.nn.Module]) -> None:
        """Give this rank its rows: embeddings in its first chunk, output layer in its last one.

        Args:
            models: GPTModels, not wrapped; in the order of the chunks, all at once or one after the other.
        """
        for model in models:
            if self._attached == 0:
                self._attach_embedding(model)
            self._attached += 1
            if self._attached == self._chunks:
                self._attach_output(model)

    def _attach_embedding(self, model: torch.nn.Module) -> None:
        rows = self._embedding.attach(model)
        if model.share_embeddings_and_output_weights:
            # One shard serves both; fused gradient accumulation of the output layer must leave zeros
            # where autograd looks for the embedding's gradient.
            self._tied_weight = rows
            rows.zero_out_wgrad = True  # type: ignore[attr-defined]

    def _attach_output(self, model: torch.nn.Module) -> None:
        shard = layers.VocabularyShard.of(self._placement, self._rank, model.vocab_size)  # type: ignore[arg-type]
        config: Any = model.config
        if self._is_last:
            # The model now ends with its last layer's hidden states; output layer and loss run here.
            last: Any = model
            last.post_process = False
            del last.output_layer
            model.register_forward_pre_hook(self._keep_labels, with_kwargs=True)
        tied = self._tied_weight is not None
        init = config.embedding_init_method if config.use_mup and not tied else config.init_method
        self._layer = layers.SplitOutputLayer(shard, config, init, self._tp_group, has_weight=not tied)
        model.output_layer = self._layer

    def _keep_labels(self, _model: torch.nn.Module, _args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._labels = kwargs.get("labels")

    # -- FORWARD and BACKWARD of the model's ends ------------------------------------------------

    @contextlib.contextmanager
    def around_forward(self, forward: feature.ForwardPass, call: feature.Call) -> Iterator[None]:
        """Context in which the last chunk returns hidden states; the loss is computed later."""
        if forward.op.chunk == 0:
            self._embedding.enter(forward.op)
        if forward.op.chunk != self._last_chunk:
            yield
            return
        forward.ends_in_loss = False
        forward.forward_step_func = self._capture(forward.forward_step_func)
        yield
        assert forward.output is not None
        self._put(forward.op, forward.output.detach())

    @contextlib.contextmanager
    def around_backward(
        self, backward: feature.BackwardPass, call: feature.Call, state: feature.Iteration
    ) -> Iterator[None]:
        """Context that sets the last chunk's gradient to the sum over all parts of the vocabulary."""
        if backward.op.chunk == self._last_chunk:
            backward.gradient = self._hidden_gradient(backward.op)
        yield

    def _capture(self, forward_step_func: Callable[..., Any]) -> Callable[..., Any]:
        """The script's forward step, for the last chunk of the last stage; keeps its loss function."""

        def forward_step(*positional: Any, **keywords: Any) -> Any:
            output, self._loss_func = forward_step_func(*positional, **keywords)
            return output, self._loss_func

        return forward_step

    def _put(self, op: RankOp, hidden: torch.Tensor) -> None:
        """Keep the output of the last chunk's FORWARD for the VOCAB_FORWARD that follows.

        Args:
            op: The FORWARD.
            hidden: Its output ``[s, b, h]``, detached.
        """
        if self._labels is None or self._loss_func is None:
            raise RuntimeError(
                f"{op.label}: the training script gave the model no labels, which a split vocabulary needs"
            )
        labels = self._labels.t().contiguous()
        self._ready[op.microbatch, op.slice] = hidden, labels, self._loss_func
        self._labels = self._loss_func = None
        self._output_dtype = hidden.dtype  # under bf16 Megatron widens what the last stage returns

    def _hidden_gradient(self, op: RankOp) -> torch.Tensor:
        """Gradient of the last chunk's output: the sum over all parts of the vocabulary."""
        own, arriving = self._gradients.pop((op.microbatch, op.slice))
        total = own.to(self._output_dtype)
        if arriving:
            total = total.to(torch.promote_types(total.dtype, torch.float32), copy=True)
        for part in self._arrived(arriving):
            total += part
        return total.to(self._output_dtype)

    # -- operations ------------------------------------------------------------------------------

    def handlers(self) -> Mapping[Kind, feature.Handler]:
        own = {Kind.VOCAB_FORWARD: self._forward, Kind.VOCAB_BACKWARD: self._backward}
        return own | self._embedding.handlers()

    def _forward(self, op: RankOp, call: feature.Call, state: feature.Iteration) -> None:
        if call.collect_non_loss_data:
            raise RuntimeError(
                f"{op.label}: data that is not the loss comes from whole logits, which a split vocabulary never has"
            )
        key, loss_func = (op.microbatch, op.slice), None
        if self._is_last:
            hidden, labels, loss_func = self._ready.pop(key)
            hidden = hidden.to(self._weight_dtype)
            for stage in self._helpers:
                self._send(hidden, stage, op, divided=self._divided)
                self._send(labels, stage, op)
        else:
            shapes = self._shapes(op, call)
            hidden = torch.empty(shapes[0], dtype=self._weight_dtype, device=call.device)
            labels = torch.empty(shapes[1], dtype=torch.int64, device=call.device)
            arriving = [self._expect(hidden, self._last_stage, op, divided=self._divided)]
            arriving.append(self._expect(labels, self._last_stage, op))
            hidden, labels = self._arrived(arriving)
        work = self._compute(hidden, labels, call.forward_only)
        work.loss_func = loss_func
        statistics = self._over_tp(work.shard.statistics)
        if self._is_last:
            work.shard.statistics = statistics
            like = statistics.transpose(0, 1)
            buffers = [like.new_empty(like.shape) for _ in self._helpers]
            parts = zip(buffers, self._helpers, strict=True)
            work.arriving = [self._expect(buffer, stage, op) for buffer, stage in parts]
            self._work[key] = work
        else:
            self._send(statistics.transpose(0, 1), self._last_stage, op)
            if not call.forward_only:
                self._work[key] = work

    def _compute(self, hidden: torch.Tensor, labels: torch.Tensor, forward_only: bool) -> _Work:
        assert self._layer is not None
        hidden.requires_grad_(not forward_only)
        logits = self._layer.logits(hidden, self._tied_weight)
        shard = ShardLogits(logits.detach(), labels, self._layer.shard.first)
        logits.data = torch.empty(1, dtype=logits.dtype, device=logits.device)  # only its node is needed
        return _Work(hidden, logits, shard)

    def _backward(self, op: RankOp, call: feature.Call, state: feature.Iteration) -> None:
        from megatron.core.pipeline_parallel.schedules import custom_backward

        key = op.microbatch, op.slice
        work = self._work.pop(key)
        if self._is_last:
            losses, statistics = self._losses(work)
            losses.requires_grad_()
            self._run_loss(work, losses, call, state)
            assert losses.grad is not None
            back = torch.stack((log_sum_exp(statistics), losses.grad.t()), dim=1)
            for stage in self._helpers:
                self._send(back, stage, op)
        else:
            tokens, batch = work.shard.statistics.shape[1:]
            buffer = torch.empty((tokens, 2, batch), dtype=torch.float32, device=call.device)
            (back,) = self._arrived([self._expect(buffer, self._last_stage, op)])
        gradient = work.shard.gradient(back[:, 0], back[:, 1])
        if call.config.cross_entropy_loss_fusion:
            gradient = gradient.to(torch.bfloat16)  # as Megatron's fused cross entropy does, in fp32 too
        gradient = gradient.to(work.logits.dtype)
        custom_backward(work.logits, gradient)
        assert work.hidden.grad is not None
        grad = work.hidden.grad
        if self._is_last:
            buffers = [(torch.empty_like(grad), stage) for stage in self._helpers]
            parts = [self._expect(buffer, stage, op, divided=self._divided) for buffer, stage in buffers]
            self._gradients[key] = grad, parts
        else:
            self._send(grad, self._last_stage, op, divided=self._divided)

    def finish(self, call: feature.Call, state: feature.Iteration) -> None:
        """At the end of the iteration: compute the losses of an evaluation, and wait for the last sends."""
        for key in sorted(self._work) if call.forward_only else ():
            work = self._work.pop(key)
            losses, _ = self._losses(work)
            self._run_loss(work, losses, call, state)
            state.note_reports(key[0])
        self._channels.wait_sends()
        self._embedding.finish()
        left = [*self._ready, *self._work, *self._gradients]
        if left:
            raise RuntimeError(f"vocabulary operations are missing for (microbatch, slice) {sorted(set(left))}")

    def close(self) -> None:
        """Destroy the groups."""
        self._embedding.close()
        self._channels.close()

    # -- the loss --------------------------------------------------------------------------------

    def _losses(self, work: _Work) -> tuple[torch.Tensor, torch.Tensor]:
        """Token losses ``[b, s]`` and the statistics that they come from."""
        parts = (part.transpose(0, 1) for part in self._arrived(work.arriving))
        statistics = merge([work.shard.statistics, *parts])
        return token_losses(statistics).t().contiguous(), statistics

    def _run_loss(self, work: _Work, losses: torch.Tensor, call: feature.Call, state: feature.Iteration) -> None:
        """Call the script's loss function as Megatron's forward step does, then compute its gradient."""
        from megatron.core.pipeline_parallel import schedules

        if call.config.timers is not None:
            call.config.timers("forward-compute", log_level=2).start()
        with torch.set_grad_enabled(not call.forward_only):
            loss, num_tokens = schedules.forward_step_calc_loss(
                call.models[-1],
                losses,
                work.loss_func,
                config=call.config,
                vp_stage=None,
                collect_non_loss_data=call.collect_non_loss_data,
                num_microbatches=call.num_microbatches,
                forward_data_store=state.reports,
                cp_group_size=1,
                is_last_stage=True,
            )
        state.num_tokens += num_tokens
        if not call.forward_only:
            scale = call.config.grad_scale_func
            (loss if scale is None else scale(loss)).backward()

    # -- messages --------------------------------------------------------------------------------

    @property
    def _helpers(self) -> list[int]:
        """All stages but the last, which compute parts of its output layer."""
        return self._team.others(self._last_stage)

    @property
    def _weight_dtype(self) -> torch.dtype:
        """Returns the dtype of the output layer; between stages hidden states may have a wider one."""
        assert self._layer is not None
        weight = self._layer.weight if self._tied_weight is None else self._tied_weight
        return weight.dtype

    def _shapes(self, op: RankOp, call: feature.Call) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the shapes of hidden states and labels on a rank."""
        length, batch, _ = shape = call.shape(op)
        assert self._layer is not None
        tokens = length * self._tp_group.size() if self._layer.sequence_parallel else length
        return shape, (tokens, batch)

    def _send(self, tensor: torch.Tensor, stage: int, op: RankOp, *, divided: bool = False) -> None:
        self._team.send(self._channels, tensor, stage, op, divided=divided)

    def _expect(self, buffer: torch.Tensor, stage: int, op: RankOp, *, divided: bool = False) -> layers.Arriving:
        return self._team.expect(self._channels, buffer, stage, op, divided=divided)

    def _arrived(self, arriving: Sequence[layers.Arriving]) -> Iterator[torch.Tensor]:
        return layers.arrived(arriving, self._timeline, self._channels)

    def _over_tp(self, statistics: torch.Tensor) -> torch.Tensor:
        """Statistics of the whole replica, the same on all of its ranks."""
        assert statistics.shape[0] == STATISTICS
        if self._tp_group.size() == 1:
            return statistics
        parts = [torch.empty_like(statistics) for _ in range(self._tp_group.size())]
        dist.all_gather(parts, statistics, group=self._tp_group)
        return merge(parts)


def open_feature(context: feature.OpenContext) -> feature.RuntimeFeature:
    """Open the split vocabulary on this rank."""
    return SplitVocabulary(context)
