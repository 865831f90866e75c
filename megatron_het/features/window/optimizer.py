"""Updating one ministage at a time with Megatron's distributed optimizer.

There is one distributed optimizer over all ministages, so that schedulers, gradient norm, overflow
checks and checkpoints are Megatron's own.  A ministage is updated by showing the inner optimizer
only the ministage's part of every parameter group.  Main parameters live in the shards, so an
update needs no whole parameters.

The exact update leaves ``optimizer.step()`` to Megatron up to the inner step: unscaling, overflow
check, norm, clipping.  Instead of stepping, the gradients (clipped by then) and the parameter
groups (with this iteration's learning rate) are kept, and each ministage is stepped when it is next
opened.  An iteration that overflows keeps nothing, so nothing needs to be undone.

Updates inside the iteration use the gradients unclipped.  Under ``undo`` the state before the
update and the gradients are copied to the host.  If Megatron's ``optimizer.step()`` then skips or clips,
the old state is restored when the ministage is next opened, and a clipped update is made there.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_het.distributed.gradient_sums import is_tied_copy
from megatron_het.distributed.resharding import CopiesCheck
from megatron_het.features.window.chunk import ChunkWindow
from megatron_het.features.window.spec import WindowOptions
from megatron_het.features.window.state import Entry, OffloadedState, UndoLog

Groups = list[dict[str, Any]]
_REPLACED = (
    "_copy_model_grads_to_main_grads",
    "step_with_ready_grads",
    "get_grads_for_grad_norm",
    "_get_main_param_and_optimizer_states",
    "_set_main_param_and_optimizer_states",
    "_copy_model_params_to_main_params",
    "_allocate_states",
    "load_state_dict",
)


class ChunkedOptimizer:
    """Steps one of Megatron's optimizers chunk by chunk.

    Args:
        chunks: The windows over its parameters, one per chunk.
        options: Time of updates, and place of the state.
    """

    def __init__(self, optimizer: DistributedOptimizer, chunks: Sequence[ChunkWindow], options: WindowOptions) -> None:
        self._optimizer = optimizer
        self._chunks = chunks
        self._options = options
        self.clip_grad: float = optimizer.config.clip_grad
        self._entries: list[list[Entry]] = [[] for _ in chunks]
        self._pending: dict[int, tuple[Groups, list[tuple[torch.Tensor, torch.Tensor]]]] = {}
        self._groups: dict[int, Groups] = {}
        self._copies: dict[torch.Tensor, int] = {}
        self._collect_entries()
        self._check = CopiesCheck(len(self._copies))
        inner = self._optimizer.optimizer
        self._states = {
            c: OffloadedState(self._entries[c], inner, chunk.use)
            for c, chunk in enumerate(chunks)
            if options.offload_optimizer
        }
        self._undo = [
            UndoLog(entries, inner, chunk.use)
            for entries, chunk in zip(self._entries, chunks, strict=True)
            if options.update == "undo"
        ]
        self._squares: torch.Tensor | None = None
        # Instance attributes shadow methods of the class, which would not find this optimizer's gradients
        # and parameters.
        self._optimizer._copy_model_grads_to_main_grads = self._attach_all
        self._optimizer.step_with_ready_grads = self._defer
        # For checkpoints, parameter by parameter in the order of the chunks.
        self._lent: int | None = None
        self._optimizer._get_main_param_and_optimizer_states = self._lend
        self._optimizer._set_main_param_and_optimizer_states = self._take
        self._optimizer._copy_model_params_to_main_params = self._reload
        self._optimizer._allocate_states = self._make_states
        self._optimizer.load_state_dict = self._load
        if options.update in ("at-once", "per-ministage"):
            # This rank's gradients no longer exist when Megatron asks for their norm.
            self._optimizer.get_grads_for_grad_norm = lambda *_: [] if self._squares is None else [self._squares.sqrt()]

    def _collect_entries(self) -> None:
        """Find every main parameter's shard, and make fp32 main parameters views of the shards."""
        owner = {
            p: (c, bucket)
            for c, chunk in enumerate(self._chunks)
            for bucket in chunk.buckets
            for p in bucket.source.params_list
        }
        self._owner = {parameter: c for parameter, (c, _) in owner.items()}
        optimizer = self._optimizer
        for models, mains, in_shard in (
            (optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups, False),
            (optimizer.model_fp32_groups, optimizer.shard_fp32_groups, True),
        ):
            for group, (model_group, main_group) in enumerate(zip(models, mains, strict=True)):
                for model, main in zip(model_group, main_group, strict=True):
                    c, bucket = owner[model]
                    ranges = optimizer._get_model_param_range_map(model)
                    span = ranges["gbuf_local"]
                    self._entries[c].append(Entry(main, bucket, span.start, span.end, group, in_shard))
                    if is_tied_copy(model):
                        self._copies[main] = ranges["param"].start
        for chunk, entries in zip(self._chunks, self._entries, strict=True):
            chunk.fetch()  # a view needs memory behind it
            for entry in entries:
                if entry.in_shard:
                    entry.main.data = entry.of(entry.bucket.shard)
            chunk.store()

    def detach(self) -> None:
        """Restore the methods of Megatron's optimizer, and drop everything kept for it."""
        for name in _REPLACED:
            vars(self._optimizer).pop(name, None)
        self._pending.clear()
        self._groups.clear()
        self._undo.clear()
        self._states.clear()
        for main in (entry.main for entries in self._entries for entry in entries):
            main.grad = None
        self._entries = [[] for _ in self._chunks]
        self._owner = {}
        self._copies = {}

    # -- what Megatron's optimizer calls -------------------------------------------------------

    @torch.no_grad()
    def _attach_all(self) -> None:
        """Attach all gradient shards to main parameters; replaces the copy from the (freed) gradient buffers."""
        for c in range(len(self._chunks)):
            if self._undo:
                self._undo[c].fetch_gradients()
            self._attach(c)

    @torch.no_grad()
    def _defer(self) -> bool:
        """Keep the gradients and groups for later steps; replaces the inner step and the gather."""
        if self._options.update in ("at-once", "per-ministage"):
            return True
        for c, entries in enumerate(self._entries):
            if self._undo and self._undo[c].was_right():
                self._undo[c].confirm()
                for entry in entries:
                    entry.main.grad = None
                self._chunks[c].drop_gradient_shards()
                continue
            kept = [(e.main, e.main.grad) for e in entries if e.main.grad is not None]
            groups = self._groups[c] if self._undo else self._groups_of(c)
            self._pending[c] = (groups, kept)
        return True

    def _lend(self, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        """The main parameter and its state, on the device until those of another chunk are requested."""
        self._bring(self._owner[parameter])
        method = type(self._optimizer)._get_main_param_and_optimizer_states
        found: dict[str, torch.Tensor] = method(self._optimizer, parameter)
        return found

    def _take(self, parameter: torch.nn.Parameter, tensors: dict[str, torch.Tensor]) -> None:
        """Sets a main parameter and its state from a checkpoint."""
        self._bring(self._owner[parameter])
        type(self._optimizer)._set_main_param_and_optimizer_states(self._optimizer, parameter, tensors)

    def _load(self, state_dict: dict[str, Any]) -> None:
        """Load into the existing state tensors; replaces the loading that allocates all state at once.

        Fused optimizers would make new tensors from tensors whose memory may be freed by now.
        """
        self._make_states()
        inner = self._optimizer.optimizer
        inner.load_state_dict = functools.partial(torch.optim.Optimizer.load_state_dict, inner)
        try:
            type(self._optimizer).load_state_dict(self._optimizer, state_dict)
        finally:
            del inner.load_state_dict
        self.give_back()

    @torch.no_grad()
    def _make_states(self) -> None:
        """Create the optimizer state that a first step would create, chunk by chunk."""
        inner = self._optimizer.optimizer
        counts_each = isinstance(inner, torch.optim.Adam)
        for c, entries in enumerate(self._entries):
            missing = [entry.main for entry in entries if not inner.state.get(entry.main)]
            if not missing:
                continue
            self._bring(c)
            for main in missing:
                made = {key: torch.zeros_like(main.data) for key in self._optimizer.optimizer_state_keys}
                inner.state[main] = {"step": torch.tensor(0.0), **made} if counts_each else made
            self.give_back()

    @torch.no_grad()
    def _reload(self, state_dict: dict[str, Any] | None = None) -> None:
        """Copy the shards, or a given state, into main parameters; replaces the copy from full parameters."""
        if state_dict is not None:  # read from there, written to all main parameters at once
            for c in range(len(self._chunks)):
                self._hold(c)
            type(self._optimizer)._copy_model_params_to_main_params(self._optimizer, state_dict)
            for c in range(len(self._chunks)):
                self._let_go(c)
            return
        for c, entries in enumerate(self._entries):
            self._bring(c)
            for entry in entries:
                if not entry.in_shard:
                    entry.main.copy_(entry.of(entry.bucket.shard))
        self.give_back()

    # -- what the window calls -----------------------------------------------------------------

    def begin(self) -> None:
        """Start an iteration: drop gradient shards that no update will use (after a skipped step)."""
        self._groups.clear()
        self._squares = None
        for c, chunk in enumerate(self._chunks):
            if c not in self._pending:
                chunk.drop_gradient_shards()

    def give_back(self) -> None:
        """Return the chunk's state that a checkpoint has accessed to its place between updates."""
        if self._lent is not None:
            chunk, self._lent = self._lent, None
            self._let_go(chunk)

    def store_all(self) -> None:
        """Return all state to its place between updates."""
        for state in self._states.values():
            state.store()

    def fetch(self, chunk: int) -> None:
        """Start copying the chunk's state to the device, if an update is pending."""
        if chunk in self._states and self._is_due(chunk):
            self._states[chunk].fetch()

    def fetch_all(self) -> None:
        """Copy all state to the device."""
        for chunk in self._states:
            self._fetch_state(chunk)

    @torch.no_grad()
    def apply_pending(self, chunk: int) -> None:
        """Apply the chunk's pending update before its parameters are used.

        Undoes an update that ``optimizer.step()`` did not confirm, and makes the update that it
        kept, if there is one.
        """
        if not self._is_due(chunk):
            return
        self._fetch_state(chunk)
        if self._undo and self._undo[chunk].is_open:
            self._undo[chunk].take_back()
            self._show(chunk)
        if chunk in self._pending:
            groups, kept = self._pending.pop(chunk)
            for main, gradient in kept:
                main.grad = gradient
                if gradient.is_cuda:  # freed on another stream than the one that made it
                    gradient.record_stream(torch.cuda.current_stream())
            self._step(chunk, groups)
        else:
            self._store_state(chunk)

    @torch.no_grad()
    def attach(self, chunk: int) -> list[torch.Tensor]:
        """Attach the chunk's gradient shards, which are summed and scaled; returns those that count in norms."""
        if not self._groups:
            self._groups = {c: self._groups_of(c) for c in range(len(self._chunks))}
        self._fetch_state(chunk)
        self._attach(chunk)
        if self._undo:
            return []
        counted: list[torch.Tensor] = self._optimizer._filter_grads_for_norm([e.main for e in self._entries[chunk]])
        for gradient in counted:
            square = gradient.float().square().sum()
            self._squares = square if self._squares is None else self._squares + square
        return counted

    @torch.no_grad()
    def step_now(self, chunk: int, norm: float | None) -> None:
        """Update a chunk with its attached gradients, clipped by a norm if there is one."""
        if not self._undo:
            if norm is not None:
                mains = [entry.main for entry in self._entries[chunk]]
                clip_grad_by_total_norm_fp32(mains, self.clip_grad, norm)
            self._step(chunk, self._groups[chunk])
            return
        scaler = self._optimizer.grad_scaler
        self._undo[chunk].begin(self._groups[chunk], None if scaler is None else scaler.inv_scale)
        self._step(chunk, [dict(group) for group in self._groups[chunk]], keep_gradients=True)
        self._undo[chunk].store_gradients()

    # -- helpers -------------------------------------------------------------------------------

    def _bring(self, chunk: int) -> None:
        """Copy a chunk's shards and state to the device, and return those of the previous chunk to their place."""
        if chunk != self._lent:
            self.give_back()
            self._lent = chunk
            self._hold(chunk)

    def _hold(self, chunk: int) -> None:
        self._chunks[chunk].fetch()
        for bucket in self._chunks[chunk].buckets:
            if bucket.host is not None:
                bucket.host.wait()
        self._fetch_state(chunk)

    def _fetch_state(self, chunk: int) -> None:
        if chunk in self._states:
            self._states[chunk].fetch()
            self._states[chunk].wait()

    def _store_state(self, chunk: int) -> None:
        if chunk in self._states:
            self._states[chunk].store()

    def _let_go(self, chunk: int) -> None:
        self._store_state(chunk)
        if not self._chunks[chunk].is_open:
            self._chunks[chunk].store()

    def _is_due(self, chunk: int) -> bool:
        return chunk in self._pending or bool(self._undo and self._undo[chunk].is_open)

    def _attach(self, chunk: int) -> None:
        for entry in self._entries[chunk]:
            if entry.bucket.gradient is not None:
                entry.main.grad = entry.of(entry.bucket.gradient).float()
                if entry.main in self._copies:
                    self._check.see(self._copies[entry.main], entry.main.grad)

    def _groups_of(self, chunk: int) -> Groups:
        """The chunk's part of the parameter groups, with their present hyperparameters."""
        return [
            {**group, "params": [e.main for e in self._entries[chunk] if e.group == g]}
            for g, group in enumerate(self._optimizer.optimizer.param_groups)
        ]

    def _step(self, chunk: int, groups: Groups, *, keep_gradients: bool = False) -> None:
        inner = self._optimizer.optimizer
        whole = inner.param_groups
        inner.param_groups = groups
        try:
            inner.step()
        finally:
            inner.param_groups = whole
        for group, stepped in zip(whole, groups, strict=True):
            # Optimizers that count steps per group do not count for one without parameters: its count
            # may be older than that of the ministages that were stepped before.
            if stepped["params"] and "step" in stepped:
                group["step"] = stepped["step"]
        self._show(chunk)
        for entry in self._entries[chunk]:
            entry.main.grad = None
        self._store_state(chunk)
        if not keep_gradients:
            self._chunks[chunk].drop_gradient_shards()

    def _show(self, chunk: int) -> None:
        """Copy main parameters into the shards that will be gathered."""
        for entry in self._entries[chunk]:
            if not entry.in_shard:
                entry.of(entry.bucket.shard).copy_(entry.main)
