#!/usr/bin/env bash
# DeepSeek-V3 without multi-token prediction: latent attention, expert bias, a shared expert, dense first layers.
# Prints Megatron's flags of the model.
# usage: deepseek_v3.sh full|small
set -euo pipefail

case "${1:-}" in
    full)
        cat <<'FLAGS'
--num-layers 61
--hidden-size 7168
--ffn-hidden-size 18432
--num-attention-heads 128
--seq-length 4096 --max-position-embeddings 4096
--q-lora-rank 1536 --kv-lora-rank 512
--qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128
--num-experts 256 --moe-router-topk 8 --moe-ffn-hidden-size 2048
--moe-router-num-groups 8 --moe-router-group-topk 4 --moe-router-topk-scaling-factor 2.5
--moe-shared-expert-intermediate-size 2048
--moe-layer-freq [0]*3+[1]*58
--vocab-size 129280 --make-vocab-size-divisible-by 128
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
--moe-shared-expert-intermediate-size 48
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
--mscale 1.0 --mscale-all-dim 1.0
--untie-embeddings-and-output-weights
--moe-token-dispatcher-type alltoall
--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3
--moe-router-dtype fp32
--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4
FLAGS
