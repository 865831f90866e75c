"""Operations of the split vocabulary: each device's part of the word embeddings and of the output layer."""

import functools
from typing import Any

from megatron_het.schedule.deps import Dependencies, Need
from megatron_het.schedule.ir import Op, Program
from megatron_het.schedule.kinds import (
    NEITHER,
    NO_EFFECT,
    PASS_FIELDS,
    RULES,
    Direction,
    Effect,
    Ends,
    Needs,
    Price,
    Role,
    Rule,
    Rules,
    Stream,
    Value,
    add_kinds,
)
from megatron_het.schedule.memory import LOGITS as LOGITS_BYTES
from megatron_het.schedule.memory import Holdings

LOGITS, LOGITS_GRADIENT = Value("the vocabulary forward"), Value("the vocabulary backward")
EMBEDDING = Value("the part of the embeddings")
"""Of the first stage: the tokens; of others: their part of the embeddings."""


def _team(value: Value, deps: Dependencies, microbatch: int, piece: int) -> list[Need]:
    """Returns a value of all devices that a microbatch visits."""
    return [(device, (value, microbatch, piece, 0)) for device in deps.team(microbatch)]


def _last_output(deps: Dependencies) -> Rule:
    """The output of the model's last chunk."""
    stage, chunk = deps.shape.path[-1]
    return lambda device, op: [(deps.runner(stage, op.microbatch), (Value.OUTPUT, op.microbatch, op.slice, chunk))]


def _all_logits(deps: Dependencies) -> Rule:
    return lambda device, op: _team(LOGITS, deps, op.microbatch, op.slice)


def _loss(deps: Dependencies) -> Rule:
    """The last stage's own VOCAB_BACKWARD.

    The loss is made where the last stage comes to it, and its gradient is sent before that part is computed.  So the
    others wait for what comes before that operation, not for its end.
    """

    def begun(device: int, op: Op) -> list[Need]:
        last = deps.team(op.microbatch)[-1]
        return [] if last == device else [(last, (LOGITS_GRADIENT, op.microbatch, op.slice, 0))]

    return begun


def _tokens(deps: Dependencies) -> Rule:
    def needs(device: int, op: Op) -> list[Need]:
        first = deps.first(op.microbatch)
        return [] if device == first else [(first, (EMBEDDING, op.microbatch, op.slice, 0))]

    return needs


def _first_gradient(deps: Dependencies) -> Rule:
    """The gradient of the input of the model's first chunk."""
    chunk = deps.shape.path[0][1]
    return lambda device, op: [(deps.first(op.microbatch), (Value.GRADIENT, op.microbatch, op.slice, chunk))]


def _keep_logits(held: Holdings) -> Any:
    def change(node: int, op: Op) -> None:
        if held.logits:
            logits = held.logits * held.size(op)
            held.found.append((held.start[node], logits, LOGITS_BYTES))
            if held.program.forward_only:
                held.found.append((held.end[node], -logits, LOGITS_BYTES))

    return change


def _use_up_logits(held: Holdings) -> Any:
    def change(node: int, op: Op) -> None:
        if held.logits:
            held.found.append((held.end[node], -held.logits * held.size(op), LOGITS_BYTES))

    return change


_PART = NEITHER | {
    "executor": "vocabulary",
    "stream": Stream.COMPUTE,
    "role": Role.OTHER,
    "works": True,
    "meets": True,
    "fields": PASS_FIELDS,
    "effect": NO_EFFECT,
    "colour": (0.30, 0.0, 0.90),
}
_FORWARD, _BACKWARD = {"direction": Direction.FORWARD}, {"direction": Direction.BACKWARD}

# fmt: off
add_kinds({
    # This device's part of the output layer and of the cross entropy.
    "VOCAB_FORWARD": _PART | _FORWARD | {
        "mnemonic": "VF", "in_last_chunk": True, "needs": Needs(_last_output), "makes": LOGITS,
        "effect": Effect(memory=_keep_logits),
        "price": Price(seconds=lambda prices: prices.per_slice_of_device(prices.costs.vocab_forward_s))},
    "VOCAB_BACKWARD": _PART | _BACKWARD | {
        "mnemonic": "VB", "in_last_chunk": True, "needs": Needs(_all_logits, begun=_loss), "makes": LOGITS_GRADIENT,
        "effect": Effect(memory=_use_up_logits),
        "price": Price(seconds=lambda prices: prices.per_slice_of_device(prices.costs.vocab_backward_s))},
    # This device's part of the word embeddings of a slice; on the first stage: the tokens leave.
    "EMBED_FORWARD": _PART | _FORWARD | {
        "mnemonic": "EF", "needs": Needs(_tokens), "makes": EMBEDDING,
        "price": Price(seconds=lambda prices: prices.per_slice_of_device(prices.costs.embed_forward_s))},
    # Gradient of this device's part; on the first stage: the gradient of the embeddings leaves.
    "EMBED_BACKWARD": _PART | _BACKWARD | {
        "mnemonic": "EB", "needs": Needs(_first_gradient),
        "price": Price(seconds=lambda prices: prices.per_slice_of_device(prices.costs.embed_backward_s))},
})
# fmt: on


class _VocabularyRules(Rules):
    """Passes at the ends of the model need what all devices make of it."""

    def first_input(self, program: Program) -> Ends | None:
        """All parts of the embeddings."""
        return functools.partial(_team, EMBEDDING) if program.embedding else None

    def last_gradient(self, program: Program) -> Ends | None:
        """All gradients of the logits."""
        return functools.partial(_team, LOGITS_GRADIENT) if program.splits_output else None


RULES.append(_VocabularyRules())
