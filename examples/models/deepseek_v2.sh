#!/usr/bin/env bash
# DeepSeek-V2: latent attention, two shared experts, the first layer dense.
# Prints Megatron's flags of the model.
# usage: deepseek_v2.sh full|small
set -euo pipefail

case "${1:-}" in
    full)
        cat <<'FLAGS'
--num-layers 60
--hidden-size 5120
--ffn-hidden-size 12288
--num-attention-heads 128
--seq-length 4096 --max-position-embeddings 4096
--q-lora-rank 1536 --kv-lora-rank 512
--qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128
--num-experts 160 --moe-router-topk 6 --moe-ffn-hidden-size 1536
--moe-router-num-groups 8 --moe-router-group-topk 3 --moe-router-topk-scaling-factor 16.0
--moe-shared-expert-intermediate-size 3072
--moe-layer-freq [0]*1+[1]*59
--vocab-size 102400 --make-vocab-size-divisible-by 128
FLAGS
        ;;
    small)
        cat <<'FLAGS'
--num-layers 4
--hidden-size 64
--ffn-hidden-size 96
--num-attention-heads 8
--seq-length 32 --max-position-embeddings 32
--vocab-size 250
--make-vocab-size-divisible-by 32
--q-lora-rank 32 --kv-lora-rank 16
--qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16
--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 48
--moe-router-num-groups 2 --moe-router-group-topk 1 --moe-router-topk-scaling-factor 1.5
--moe-shared-expert-intermediate-size 96
--moe-layer-freq [0]*1+[1]*3
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
--norm-epsilon 1e-6
--position-embedding-type rope
--multi-latent-attention --qk-layernorm
--rope-type yarn --rotary-base 10000 --rotary-scaling-factor 40
--mscale 0.707 --mscale-all-dim 0.707
--untie-embeddings-and-output-weights
--moe-token-dispatcher-type alltoall
--moe-router-score-function softmax --moe-router-pre-softmax
--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 3e-3
FLAGS
