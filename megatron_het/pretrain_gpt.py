"""Drop-in training entry: ``torchrun ... -m megatron_het.pretrain_gpt <Megatron's flags> [--het-plan plan.json]``.

megatron-core's wheel has no ``pretrain_gpt.py``; this module offers the same flags on top of the
wheel alone.  Without ``--het-*`` flags it trains as stock Megatron does.  With ``--hybrid-layer-pattern`` it trains a
hybrid model, as ``pretrain_hybrid.py`` does.
"""

from megatron_het import gpt_training
from megatron_het.launch.start import install


def main() -> None:
    """Parse the command line and train."""
    gpt_training.main(install=install)


if __name__ == "__main__":
    main()
