"""A model of eight layers as wide as Llama 8B, and nodes of eight GPUs: what several tests of the planner price."""

from testing.planner_cases import LLAMA_8B, estimator_of
from tools.planner.costs.estimate import Estimator
from tools.planner.inputs.cluster import Cluster, NodeGroup
from tools.planner.inputs.model import Model

SHAPE: dict[str, object] = {"num_layers": 8, "vocab_size": 32000} | LLAMA_8B
"""The model without its sequences and batches."""


def model(**more: object) -> Model:
    return Model(**{**SHAPE, **more})


def estimator(priced: Model, gpu: str = "H100-SXM", nodes: int = 2, intra: float | None = None) -> Estimator:
    group = NodeGroup(gpu=gpu, count=nodes, gpus_per_node=8, network_bytes_per_s=100e9, intra_node_bytes_per_s=intra)
    return estimator_of(Cluster(nodes=(group,)), priced)
