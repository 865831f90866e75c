"""Complete programs: every schedule with every pass that can follow it, over random shapes.

What the passes make passes validator, simulator, memory curves and text, whatever is combined; or a pass refuses the
combination before.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_helpers import run

from megatron_het.features.activation_offload.spec import add_activation_offload
from megatron_het.features.context_exchange.passes import add_exchange
from megatron_het.features.vocab_parallel.spec import add_embedding, add_vocabulary
from megatron_het.features.window.passes import add_parameters, post_together
from megatron_het.schedule import Memory, Program, ScheduleError, Shape, dumps, generate, loads
from megatron_het.schedule import validate as transports
from megatron_het.schedule.generators import GENERATORS
from megatron_het.schedule.graph import Graph
from megatron_het.schedule.joint import stuck_events
from megatron_het.schedule.memory import CATEGORIES
from megatron_het.schedule.transfers import add_transfers
from megatron_het.schedule.validate import validate

SLICED = ("slimpipe", "seq1f1b", "terapipe")
V_SHAPED = ("zb-v", "v-half")


@dataclass(frozen=True)
class Request:
    """A schedule with what is added to it.

    Attributes:
        name, shape, forward_only: what is generated.
        exchange: options of the context exchange, None without.
        vocabulary, embedding: split output layer, split embeddings.
        window: options of the parameter pass, None without.
        offload: activations to the host.
    """

    name: str
    shape: Shape
    forward_only: bool = False
    exchange: dict[str, object] | None = None
    vocabulary: bool = False
    embedding: bool = False
    window: dict[str, object] | None = None
    offload: bool = False

    def program(self) -> Program:
        """All passes, in their order.

        Raises:
            ValueError: a pass refuses what came before.
        """
        passes: list[Callable[[Program], Program]] = []
        if self.exchange is not None:
            passes.append(partial(add_exchange, **self.exchange))
        if self.vocabulary:
            passes.append(add_vocabulary)
        if self.embedding:
            passes.append(add_embedding)
        passes.append(add_transfers)
        if self.window is not None:
            passes.append(partial(add_parameters, **self.window))
        if self.offload and not self.forward_only:
            passes.append(add_activation_offload)
        passes.append(post_together)
        program = generate(self.name, self.shape, forward_only=self.forward_only)
        compute = [program.compute(d) for d in range(len(program.ops))]
        for step in passes:
            program = step(program)
            assert [program.compute(d) for d in range(len(program.ops))] == compute
        return program


@st.composite
def requests(draw: st.DrawFn) -> Request:
    """A schedule, a shape that it accepts more often than not, and any features."""
    name = draw(st.sampled_from(sorted(GENERATORS)))
    stages, microbatches = draw(st.integers(1, 4)), draw(st.integers(2, 5))
    chunks = 2 if name in V_SHAPED else draw(st.integers(1, 3)) if name in ("ministage", "interleaved") else 1
    if name == "slimpipe":
        chunks = draw(st.integers(1, 2))
    slices = draw(st.integers(1, 2)) * stages if name in SLICED else 1
    replicas = (1,) * stages
    if name in ("1f1b", "gpipe", "ministage", "interleaved", *V_SHAPED, *SLICED):
        replicas = tuple(draw(st.integers(1, 2)) for _ in range(stages))
    route = tuple((*range(r), *(draw(st.integers(0, r - 1)) for _ in range(microbatches - r))) for r in replicas)
    layers = tuple((draw(st.integers(1, 2)),) * chunks for _ in range(stages))
    shape = Shape(layers, route, replicas, slices, "v" if name in V_SHAPED else "loop")
    exchange = None
    if name in SLICED and draw(st.booleans()):
        exchange = {"units": draw(st.integers(1, 2)), "helping": draw(st.booleans()), "keep": draw(st.booleans())}
    window: dict[str, object] | None = None
    if draw(st.booleans()):
        window = {"prefetch": draw(st.integers(0, 2)), "step": draw(st.sampled_from(("end", "ministage", "none")))}
        window |= {key: draw(st.booleans()) for key in ("per_layer", "offload", "keep_at_turn", "per_operation")}
    return Request(
        name,
        shape,
        draw(st.booleans()),
        exchange,
        draw(st.booleans()),
        draw(st.booleans()),
        window,
        draw(st.booleans()),
    )


def memory_of(shape: Shape) -> Memory:
    """Something of every category."""
    chunks = [len(shape.layers[d.stage]) for d in shape.devices]
    each = lambda size: tuple((size,) * n for n in chunks)  # noqa: E731
    return Memory(
        parameter_bytes=each(16.0),
        gradient_bytes=each(32.0),
        activation_bytes=each(64.0),
        kv_bytes=each(8.0),
        parameter_shard_bytes=each(4.0),
        gradient_shard_bytes=each(4.0),
        boundary_bytes=each(2.0),
        workspace_bytes=each(1.0),
        logits_bytes=(128.0,) * len(chunks),
    )


def accepted(program: Program, deadlock: bool = False) -> None:
    """No reader finds fault with it, or all agree that it would hang."""
    problems = validate(program)
    if deadlock and problems:
        assert {problem.rule for problem in problems} == {"deadlock"}
        # The simulator has a queue per directed pair, and no host that waits while a collective is under way.
        graph = Graph(program)
        apart = [*stuck_events(graph)] if program.attention_units else []
        if apart or transports.deadlock_of_collectives(graph) or transports.deadlock(graph, "edge"):
            with pytest.raises(ScheduleError, match="wait for each other"):
                run(program)
        else:
            run(program)
        return
    assert problems == [], str(problems[0])
    assert loads(dumps(program)) == program
    for host_blocks in (False, True):
        result = run(program, host_blocks=host_blocks, memory=memory_of(program.shape), message_bytes=1.0)
        assert len(list(result.events())) == sum(map(len, program.ops))
        assert result.makespan_s >= max(result.compute_s) - 1e-9
        assert all(bubble.total_s >= -1e-9 for bubble in result.bubble)
        for use in result.memory:
            for category in CATEGORIES:
                curve = use.curve(category)
                assert min(held for _, held in curve) >= -1e-6, (category, curve)
            for category in ("activations", "kv", "logits", "workspace"):
                assert use.curve(category)[-1][1] == pytest.approx(0.0, abs=1e-6), category


@given(requests())
def test_complete_programs(request: Request) -> None:
    """Valid, simulated, written and read; or refused by name."""
    try:
        program = request.program()
    except ValueError as error:
        assert str(error).startswith(("schedule ", "program ")), error
        return
    # Replicas that gather together may wait for each other where each has microbatches of its own to wait for.
    gathers = request.window is not None and max(request.shape.replicas) > 1
    accepted(program, deadlock=gathers and request.name != "ministage")


SLIM = Shape.uniform(2, 4, slices=8)
MINI = Shape.uniform(2, 4, chunks=3, layers_per_chunk=2)


@pytest.mark.parametrize("forward_only", [False, True])
@pytest.mark.parametrize(
    "request_",
    [
        Request("slimpipe", SLIM, exchange={"units": 2}, offload=True),
        Request("slimpipe", SLIM, exchange={"units": 2, "keep": True, "helping": True}, offload=True),
        Request("slimpipe", SLIM, exchange={"units": 2}, vocabulary=True, embedding=True, offload=True),
        Request("slimpipe", SLIM, vocabulary=True, embedding=True, offload=True),
        Request("ministage", MINI, window={"offload": True, "step": "none"}, offload=True),
        Request("ministage", MINI, window={"offload": True, "per_layer": True, "step": "ministage"}, offload=True),
        Request("ministage", MINI, vocabulary=True, embedding=True, window={"step": "none"}, offload=True),
    ],
)
def test_what_training_combines(request_: Request, forward_only: bool) -> None:
    """Programs that are trained with: exchange, window and offload in one program."""
    accepted(Request(**{**request_.__dict__, "forward_only": forward_only}).program())
