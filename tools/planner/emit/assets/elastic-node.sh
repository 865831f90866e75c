{% include "head.sh" %}

{{ settings }}
{{ how }}

# The controller, or the agent of a node.  All see $ELASTIC; only the owner can read the job's token.
umask 077
export ELASTIC="$RUN_DIR/elastic" LOST_S="${LOST_S:-30}"
CONTROLLER="$CONTROLLER_HOST:$CONTROLLER_PORT"
mkdir -p "$ELASTIC"
if [[ -n "${HET_NODES:-}" ]]; then
    # A controller that comes back goes on from its file: the ranks are still there.  Those of an earlier start are not.
    start=${HET_START:-${SKYPILOT_TASK_ID:-}}
    if [[ -e "$ELASTIC/state.json" && "$(cat "$ELASTIC/start" 2>/dev/null)" != "$start" ]]; then
        rm -f "$ELASTIC/token"
        mv -f "$ELASTIC/state.json" "$ELASTIC/state-before-$(date +%s).json"
    fi
    echo "$start" >"$ELASTIC/start"
    exec "$PYTHON" -m megatron_het.elastic --controller "$CONTROLLER" --token-file "$ELASTIC/token" \
        --folder "$ELASTIC" --controller-only --nodes "$HET_NODES" --lost-s "$LOST_S" "${HOW[@]}"
fi
for ((i = 0; i < 6000; i++)); do
    [[ ! -s "$ELASTIC/token" ]] || break
    sleep 0.1
done
source "$RUN_DIR/args.sh"
# Ranks load the newest checkpoint that is whole, and begin anew where no save has ever ended.
flags=(--save "$CHECKPOINTS" --save-interval "$SAVE_INTERVAL" --ckpt-format torch_dist --load "$CHECKPOINTS")
exec "$PYTHON" -m megatron_het.elastic --controller "$CONTROLLER" --token-file "$ELASTIC/token" \
    --folder "$ELASTIC" --node "$HET_GROUP-${JOB_COMPLETION_INDEX:-$SKYPILOT_NODE_RANK}" \
    --device "$HET_DEVICE" --workers "$HET_WORKERS" -- "${ELASTIC_ARGS[@]}" "${flags[@]}"
