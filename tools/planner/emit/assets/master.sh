first={{ first }}
address=$(scontrol show node "$first" -o | grep -o 'NodeAddr=[^ ]*' | cut -d= -f2 || true)
export MASTER_ADDR="${address:-$first}" MASTER_PORT=$((20000 + SLURM_JOB_ID % 12000))
