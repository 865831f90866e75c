"""Features that a plan can ask for beyond a schedule, each with a torch-free description.

A new feature is a folder here, its room: ``spec.py``, ``runtime.py`` if it does something on a rank, and its place in
the list below.  Read ``base.py`` first: the interface of a description.  Other code asks ``registry.py`` about the
features of a plan, which asks all of them.
"""

from megatron_het.features.activation_offload.spec import ActivationOffload
from megatron_het.features.context_exchange.spec import ContextExchange
from megatron_het.features.context_parallel.spec import ContextParallel
from megatron_het.features.documents.spec import Documents
from megatron_het.features.experts.spec import Experts
from megatron_het.features.initial_weights.spec import InitialWeights
from megatron_het.features.layer_graphs.spec import LayerGraphs
from megatron_het.features.mtp.spec import MultiTokenPrediction
from megatron_het.features.optimizers.spec import Optimizers
from megatron_het.features.registry import (
    FEATURES,
    attention_units,
    cutting_of,
    feature,
    features_of,
    host_parameters,
    options_of,
    slice_tokens,
    switches,
    tied_copies,
)
from megatron_het.features.slices.spec import Slices
from megatron_het.features.thrifty_layers.spec import ThriftyLayers
from megatron_het.features.vocab_parallel.spec import Vocabulary
from megatron_het.features.watch.spec import Watch
from megatron_het.features.window.spec import Window
from megatron_het.features.zero_bubble.spec import ZeroBubble

FEATURES += (
    Slices(),
    ContextParallel(),
    ContextExchange(),
    Documents(),
    Vocabulary(),
    Window(),
    ActivationOffload(),
    ThriftyLayers(),
    ZeroBubble(),
    MultiTokenPrediction(),
    InitialWeights(),
    Experts(),
    Optimizers(),
    Watch(),
    LayerGraphs(),
)
