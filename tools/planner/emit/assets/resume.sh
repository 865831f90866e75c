
# Resume from the newest checkpoint.  Without the tracker file Megatron would silently start anew.
if [[ -s "$CHECKPOINTS/latest_checkpointed_iteration.txt" ]]; then
    export HET_RESUME=1
elif compgen -G "$CHECKPOINTS/iter_*" >/dev/null; then
    echo "error: $CHECKPOINTS holds checkpoints but no latest_checkpointed_iteration.txt, or an empty one:" \
        "a save was interrupted. Write the iteration to resume from into that file, or move the folder away." >&2
    exit 1
else
    export HET_RESUME=
fi

train() {
    source "$RUN_DIR/args.sh"
    local checkpoint=(--save "$CHECKPOINTS" --save-interval "$SAVE_INTERVAL" --ckpt-format torch_dist)
    if [[ -n "$HET_RESUME" ]]; then
        checkpoint+=(--load "$CHECKPOINTS" --exit-on-missing-checkpoint)
    fi
{% if signal %}
    trap '' USR1  # what comes before Megatron listens must not end a rank
    checkpoint+=(--exit-signal-handler --exit-signal SIGUSR1)
{% endif %}
    exec {{ python }} -m "$TRAIN_MODULE" "${MEGATRON_ARGS[@]}" "${checkpoint[@]}"
}
{% if options.doctor %}
diagnose() {
    source "$RUN_DIR/args.sh"
    local more
    read -ra more <<<"${HET_DOCTOR_ARGS:-}"
    exec {{ python }} -m megatron_het.doctor --expect "$RUN_DIR/expectations.json" --checkpoints "$CHECKPOINTS" \
        --json "$RUN_DIR/logs/doctor.json" "${more[@]}" -- "${MEGATRON_ARGS[@]}"
}
export -f diagnose
{% endif %}
