#!/usr/bin/env bash
# Qwen3 30B-A3B.
# Prints Megatron's flags of the model.
# usage: qwen3_moe.sh full|small
set -euo pipefail

case "${1:-}" in
    full)
        cat <<'FLAGS'
--num-layers 48
--hidden-size 2048
--ffn-hidden-size 6144
--num-attention-heads 32
--group-query-attention --num-query-groups 4
--kv-channels 128
--seq-length 8192 --max-position-embeddings 8192
--num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768
--vocab-size 151936 --make-vocab-size-divisible-by 128
FLAGS
        ;;
    small)
        cat <<'FLAGS'
--num-layers 4
--hidden-size 64
--ffn-hidden-size 96
--num-attention-heads 8
--group-query-attention --num-query-groups 4
--kv-channels 16
--seq-length 32 --max-position-embeddings 32
--vocab-size 250
--make-vocab-size-divisible-by 32
--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 48
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
--qk-layernorm
--position-embedding-type rope
--rotary-base 1000000
--norm-epsilon 1e-6
--untie-embeddings-and-output-weights
--moe-token-dispatcher-type alltoall
--moe-router-dtype fp32
--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3
FLAGS
