#!/usr/bin/env bash
# gpt-oss 20B: sinks, windows in every other layer, experts and router with biases (hence TP 1).
# The small one has biases of queries, keys and values only: experts with biases need Transformer Engine.
# Prints Megatron's flags of the model.
# usage: gpt_oss.sh full|small
set -euo pipefail

case "${1:-}" in
    full)
        cat <<'FLAGS'
--num-layers 24
--hidden-size 2880
--ffn-hidden-size 2880
--num-attention-heads 64
--group-query-attention --num-query-groups 8
--kv-channels 64
--seq-length 8192 --max-position-embeddings 8192
--window-size 127,0
--num-experts 32 --moe-router-topk 4
--vocab-size 201088 --make-vocab-size-divisible-by 128
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
--window-size 5,0
--num-experts 4 --moe-router-topk 2
--disable-bias-linear --add-qkv-bias
FLAGS
        ;;
    *)
        echo "usage: ${0##*/} full|small" >&2
        exit 2
        ;;
esac
cat <<'FLAGS'
--normalization RMSNorm --norm-epsilon 1e-5
--quick-geglu --glu-linear-offset 1.0 --activation-func-clamp-value 7.0 --no-bias-gelu-fusion
--softmax-type learnable
--window-attn-skip-freq 2
--position-embedding-type yarn --rotary-base 150000 --rotary-scaling-factor 32
--yarn-original-max-position-embeddings 4096
--yarn-beta-fast 32 --yarn-beta-slow 1 --no-yarn-correction-range-round-to-int
--untie-embeddings-and-output-weights
--moe-token-dispatcher-type alltoall
--moe-router-dtype fp32
--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2
FLAGS
