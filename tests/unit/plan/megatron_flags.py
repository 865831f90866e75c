"""Megatron's flags of a small model, as a user writes them."""

_MODEL = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 1 --global-batch-size 8"
)
TWO_BY_TWO = "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"  # two stages of two chunks


def flags(*more: str) -> list[str]:
    """The flags of the model, and more of them; of a flag that is there twice the last one counts."""
    return [*_MODEL.split(), *" ".join(more).split()]
