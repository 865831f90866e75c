#!/usr/bin/env bash
# Qwen 2.5 7B.
# Prints Megatron's flags of the model.
# usage: qwen2_5.sh full|small
set -euo pipefail

case "${1:-}" in
    full)
        cat <<'FLAGS'
--num-layers 28
--hidden-size 3584
--ffn-hidden-size 18944
--num-attention-heads 28
--group-query-attention --num-query-groups 4
--seq-length 8192 --max-position-embeddings 8192
--vocab-size 152064 --make-vocab-size-divisible-by 128
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
--add-qkv-bias
--position-embedding-type rope
--rotary-base 1000000
--norm-epsilon 1e-6
--untie-embeddings-and-output-weights
FLAGS
