"""Closed forms of the papers, for tests, documentation and quick estimates.

p stages, m microbatches, n slices per sequence, v chunks per stage.  Activations are fractions of one
microbatch's activations of the whole model on the worst device, bubbles fractions of the ideal time.
"""


def gpipe(p: int, m: int) -> tuple[float, float]:
    """(activations, bubble); SlimPipe, Table 2."""
    return m / p, (p - 1) / m


def one_f_one_b(p: int, m: int) -> tuple[float, float]:
    """(activations, bubble); SlimPipe, Table 2 (with fewer microbatches than stages all of them are held)."""
    return min(p, m) / p, (p - 1) / m


def interleaved(p: int, m: int, v: int) -> tuple[float, float]:
    """(activations, bubble); SlimPipe, Table 2."""
    return min(1 + (p - 1) / (v * p), m / p), (p - 1) / (v * m)


def terapipe(p: int, m: int, n: int) -> tuple[float, float]:
    """(activations, bubble); SlimPipe, Table 2."""
    return m / p, (p - 1) / (n * m)


def slimpipe(p: int, m: int, n: int, v: int = 1) -> tuple[float, float]:
    """(activations, bubble with equal costs); SlimPipe, equation (1) and Table 2.

    Table 2 gives the bubble without v, though the text says that interleaving divides both.
    """
    return min(1 / p + 2 * (p - 1) / (n * v * p), m / p), (p - 1) / (n * v * m)


def slimpipe_attention_bubble(p: int, m: int, n: int) -> float:
    """SlimPipe's bubble when attention is everything and idle devices help (section 4.1.3)."""
    return (p - 1) * p / ((n + 1) * n * m)


def zb_v_bubble_bound(p: int, m: int) -> float:
    """Upper end of ZB-V's bubble, reached when attention is everything; SlimPipe, Table 2."""
    return 2 * (p - 1) / (3 * m)


def v_half_activations(p: int) -> float:
    """SlimPipe, Table 2."""
    return 1 / 2 + 1 / p


def ministage_bubble(stages: int, ministages: int, m: int) -> float:
    """Bubble of Zorse's schedule without gathers; it grows when there are fewer microbatches than stages."""
    if m >= stages:
        return (stages - 1) / (ministages * m)
    return ((stages - 1) + (ministages - 1) * (stages - m)) / (ministages * m)


def ministage_materialized_layers(layers: int, ministages: int) -> float:
    """Layers of a stage whose parameters are materialised at once: two ministages (Zorse, Table 2).

    The paper writes 2 L / S with S for the ministages of a stage of L layers.
    """
    return min(2 * layers / ministages, layers)


def ministage_gathers(layers: int) -> int:
    """All-gathers of single layers per iteration and device: one forward, one backward (Zorse, Table 2)."""
    return 2 * layers
