#!/usr/bin/env bash
# Mistral 7B (0.1); a token sees 4,096 tokens, its own among them.
# Prints Megatron's flags of the model.
# usage: mistral.sh full|small
set -euo pipefail

case "${1:-}" in
    full)
        cat <<'FLAGS'
--num-layers 32
--hidden-size 4096
--ffn-hidden-size 14336
--num-attention-heads 32
--group-query-attention --num-query-groups 8
--seq-length 8192 --max-position-embeddings 8192
--norm-epsilon 1e-5
--window-size 4095,0
--vocab-size 32000 --make-vocab-size-divisible-by 128
FLAGS
        ;;
    small)
        cat <<'FLAGS'
--num-layers 4
--hidden-size 64
--ffn-hidden-size 96
--num-attention-heads 8
--group-query-attention --num-query-groups 4
--seq-length 32 --max-position-embeddings 32
--vocab-size 250
--make-vocab-size-divisible-by 32
--window-size 11,0
FLAGS
        ;;
    *)
        echo "usage: ${0##*/} full|small" >&2
        exit 2
        ;;
esac
cat <<'FLAGS'
--normalization RMSNorm
--swiglu
--disable-bias-linear
--position-embedding-type rope
--rotary-base 10000
--untie-embeddings-and-output-weights
FLAGS
