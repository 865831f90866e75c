#!/usr/bin/env bash
# GPT-3 175B, tied embeddings, with dense attention in all layers.
# Prints Megatron's flags of the model.
# usage: gpt3.sh full|small
set -euo pipefail

case "${1:-}" in
    full)
        cat <<'FLAGS'
--num-layers 96
--hidden-size 12288
--ffn-hidden-size 49152
--num-attention-heads 96
--seq-length 2048 --max-position-embeddings 2048
--vocab-size 50257 --make-vocab-size-divisible-by 128
FLAGS
        ;;
    small)
        cat <<'FLAGS'
--num-layers 4
--hidden-size 64
--ffn-hidden-size 256
--num-attention-heads 8
--seq-length 32 --max-position-embeddings 32
--vocab-size 250
--make-vocab-size-divisible-by 32
FLAGS
        ;;
    *)
        echo "usage: ${0##*/} full|small" >&2
        exit 2
        ;;
esac
cat <<'FLAGS'
--normalization LayerNorm
--position-embedding-type learned_absolute
FLAGS
