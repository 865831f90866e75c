#!/usr/bin/env bash
# GPT-2 XL (1.5B), tied embeddings.
# Prints Megatron's flags of the model.
# usage: gpt2.sh full|small
set -euo pipefail

case "${1:-}" in
    full)
        cat <<'FLAGS'
--num-layers 48
--hidden-size 1600
--ffn-hidden-size 6400
--num-attention-heads 25
--seq-length 1024 --max-position-embeddings 1024
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
