{% set said, action = {
    "requeue": ("the job is queued again", 'scontrol requeue "$SLURM_JOB_ID"\n        sleep 60  # Slurm ends this script'),
    "chain": ("another job goes on", 'sbatch --dependency=afterany:"$SLURM_JOB_ID" "$RUN_DIR/' ~ script ~ '"'),
    "stop": ("submit the script again to go on", "true"),
}[options.at_time_limit] %}
    state=$(scontrol show job "$SLURM_JOB_ID" -o | grep -o 'JobState=[A-Z_]*' | head -n1 || true)
{% if options.iterations %}
    if (($(newest) >= {{ options.iterations }})); then
        rc=0
    elif (($(newest) > before)) && [[ "$state" == JobState=RUNNING ]]; then
{% else %}
    if (($(newest) > before)) && [[ "$state" == JobState=RUNNING ]]; then
{% endif %}
        echo "stopped after iteration $(newest){{ " of %d" % options.iterations if options.iterations else "" }}; {{ said }}"
        {{ action }}
    fi
fi
exit "$rc"
