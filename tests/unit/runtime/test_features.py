"""The one protocol of features on a rank: who executes what, in which order, and what is left after closing."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_het.device import activate

PLATFORM = activate()  # before Megatron is imported, which binds what the platform replaces

from megatron_het.features import FEATURES  # noqa: E402
from megatron_het.features.window.chunk import WindowUse  # noqa: E402
from megatron_het.features.window.runtime import ParameterWindow  # noqa: E402
from megatron_het.features.window.spec import WindowOptions  # noqa: E402
from megatron_het.lowering.ranks import RankOp, RankProgram  # noqa: E402
from megatron_het.plan.run_config import HetConfig  # noqa: E402
from megatron_het.report import Timeline  # noqa: E402
from megatron_het.runtime.executor import Executor, ExecutorError  # noqa: E402
from megatron_het.runtime.feature import Call, Handler, Iteration, RuntimeFeature  # noqa: E402
from megatron_het.runtime.session import HetSession  # noqa: E402
from megatron_het.schedule.kinds import Kind  # noqa: E402
from tests.unit.features.window.test_window import fake_chunk  # noqa: E402
from tests.unit.plan.test_plan import document, read  # noqa: E402


class Recorder(RuntimeFeature):
    """Writes down what it is asked."""

    def __init__(self, name: str, kinds: tuple[Kind, ...], log: list[str]) -> None:
        self.name, self._kinds, self._log = name, kinds, log

    def handlers(self) -> dict[Kind, Handler]:
        return {kind: lambda op, call, state: self._log.append(f"{self.name} {op.kind.name}") for kind in self._kinds}

    def begin(self, call: Call, state: Iteration) -> None:
        self._log.append(f"{self.name} begin")

    def finish(self, call: Call, state: Iteration) -> None:
        self._log.append(f"{self.name} finish")

    def close(self) -> None:
        self._log.append(f"{self.name} close")


def executor(kinds: tuple[Kind, ...], features: list[RuntimeFeature]) -> Executor:
    program = RankProgram(tuple(RankOp(kind, 0, 0, 0, kind.name) for kind in kinds), 1, (0,), frozenset())
    channels: Any = SimpleNamespace(wait_sends=lambda: None)
    chunks: Any = {"loss_chunk": 0, "num_chunks": 1, "tells_chunk": False}
    return Executor({False: program}, channels, **chunks, timeline=Timeline(), features=features)


def test_operations_go_to_the_feature_that_executes_them() -> None:
    log: list[str] = []
    features = [Recorder("a", (Kind.ACT_OFFLOAD,), log), Recorder("b", (Kind.BACKWARD_WEIGHT,), log)]
    config: Any = SimpleNamespace(no_sync_func=None, param_sync_func=None)
    call = Call(print, [None], [], config, 1, 1, 1, lambda m: 1, None, torch.float32, torch.device("cpu"), False, False)
    executor((Kind.BACKWARD_WEIGHT, Kind.ACT_OFFLOAD), list(features)).run(call)
    operations = ["b BACKWARD_WEIGHT", "a ACT_OFFLOAD"]
    assert log == ["a begin", "b begin", *operations, "a finish", "b finish"]


def test_an_operation_without_a_feature_is_refused_before_training() -> None:
    with pytest.raises(ExecutorError, match="nothing executes BACKWARD_WEIGHT"):
        executor((Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT), [])


def test_two_features_cannot_execute_one_kind() -> None:
    twice: list[RuntimeFeature] = [Recorder(name, (Kind.ACT_FETCH,), []) for name in "ab"]
    with pytest.raises(ExecutorError, match="b: .*ACT_FETCH.*already"):
        executor((), twice)


def test_kinds_are_executed_by_the_feature_that_their_row_names() -> None:
    names = {feature.name for feature in FEATURES} | {"compute", "transfer"}
    assert {kind.executor for kind in Kind} <= names | {None}


def test_a_session_closes_its_features_in_the_reverse_order_and_twice_is_once() -> None:
    log: list[str] = []
    session = HetSession(HetConfig(read(document())), PLATFORM)
    session._features = (Recorder("a", (), log), Recorder("b", (), log))
    assert session.feature("b") is session._features[1]
    session.close()
    session.close()
    assert log == ["b close", "a close"] and session.feature("b") is None


def test_a_closed_window_leaves_no_memory_and_another_one_can_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the same chunks, in the same process."""
    ddp = fake_chunk()
    buffer = ddp.buffers[0]
    monkeypatch.setattr("megatron.core.distributed.DistributedDataParallel", SimpleNamespace)
    whole = buffer.param_data.clone()
    for options in (WindowOptions(offload=True), WindowOptions()):
        buffer.param_data.untyped_storage().resize_(whole.nbytes)
        buffer.grad_data.untyped_storage().resize_(whole.nbytes)
        buffer.param_data.copy_(whole)
        group: Any = None
        window = ParameterWindow(options, group, group, counts_tokens=False)
        window.adopt([ddp])
        window.materialise()
        assert torch.equal(buffer.param_data, whole)
        shards = [bucket.shard for chunk in window.windows() for bucket in chunk.buckets]
        window.close()
        # Sizes alone: to show a tensor without memory in a failure would end the process.
        sizes = [tensor.untyped_storage().size() for tensor in (buffer.param_data, buffer.grad_data, *shards)]
        assert not any(sizes)
        assert not [hook for module in ddp.module.modules() for hook in module._forward_pre_hooks]
        assert not hasattr(buffer, "het_window") and not list(window.windows())
        assert not window._optimizers
        assert set(window.use.held_bytes.values()) == {0}
    assert WindowUse().streams is not WindowUse().streams
