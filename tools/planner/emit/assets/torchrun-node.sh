{% set start %}
"$PYTHON" -m torch.distributed.run --nnodes={{ nodes | length }} --node-rank={{ index }} --nproc-per-node={{ node.ranks | length }} \
    --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" \
    --log-dir="$RUN_DIR/logs" --no-python bash -c
{%- endset %}
{% set check = start ~ " 'as_rank diagnose'" %}
{% include "head.sh" %}

{{ settings }}
{% if node.devices != whole %}
export {{ "CUDA_VISIBLE_DEVICES" | default_of(node.devices | join(",")) }}
{% endif %}
{% if nodes[0].host %}
export {{ "MASTER_ADDR" | default_of(nodes[0].host) }}
{% elif nodes | length > 1 %}
export MASTER_ADDR="${MASTER_ADDR:?set it to the address of node 0}"
{% else %}
export MASTER_ADDR="${MASTER_ADDR:-127.0.0.1}"
{% endif %}
export MASTER_PORT="${MASTER_PORT:-29500}"
{% include "resume.sh" %}
# torchrun's rank n is rank HET_RANKS[n] of the plan.
export HET_RANKS={{ ranks | quote }}
as_rank() {
    local ranks
    read -ra ranks <<<"$HET_RANKS"
    export RANK=${ranks[$RANK]}
    "${1:-train}"
}
export -f train as_rank
{% include "doctor.sh" %}

exec {{ start }} as_rank
