newest() {  # the iteration of the newest checkpoint
    local iteration=
    [[ ! -s "$CHECKPOINTS/latest_checkpointed_iteration.txt" ]] ||
        read -r iteration <"$CHECKPOINTS/latest_checkpointed_iteration.txt" || true
    [[ "$iteration" =~ ^[0-9]+$ ]] || iteration=0
    echo "$((10#$iteration))"
}
before=$(newest)
