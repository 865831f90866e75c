"""Answers to what a plan and its features ask of the model's class: Megatron's ``GPTModel`` or ``HybridModel``.

Everything that depends on the class is behind :class:`ModelFamily`: open ``base.py`` first.  Functions of arguments
need no torch.
"""

from megatron_het.families.base import ModelFamily
from megatron_het.families.gpt import GPT
from megatron_het.families.hybrid import HYBRID
from megatron_het.plan import Plan

__all__ = ["GPT", "HYBRID", "ModelFamily", "family_for", "family_of", "family_of_config", "family_of_model"]


def family_of(args: object) -> ModelFamily:
    """The family of the model that Megatron's arguments describe."""
    return HYBRID if getattr(args, "hybrid_layer_pattern", None) is not None else GPT


def family_for(plan: Plan) -> ModelFamily:
    """The family of the model that a plan is for."""
    return HYBRID if plan.model.pattern else GPT


def family_of_config(config: object) -> ModelFamily:
    """The family of Megatron's configuration of a model."""
    return HYBRID if hasattr(config, "hybrid_stack_spec") else GPT


def family_of_model(model: object) -> ModelFamily:
    """The family of a model chunk that is not wrapped."""
    return HYBRID if hasattr(model, "hybrid_layer_pattern") else GPT
