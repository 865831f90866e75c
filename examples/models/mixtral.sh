#!/usr/bin/env bash
# Mixtral 8x7B.
# Prints Megatron's flags of the model.
# usage: mixtral.sh full|small
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
--num-experts 8
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
--num-experts 4
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
--rotary-base 1000000
--untie-embeddings-and-output-weights
--moe-token-dispatcher-type alltoall
--moe-router-topk 2
--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 2e-2
FLAGS
