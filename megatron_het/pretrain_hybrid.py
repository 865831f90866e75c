"""Drop-in training entry of hybrid models, with ``--hybrid-layer-pattern``: ``pretrain_gpt`` trains these too."""

from megatron_het.pretrain_gpt import main

if __name__ == "__main__":
    main()
