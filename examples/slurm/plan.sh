#!/usr/bin/env bash
# Plans a model for two Slurm partitions and writes one batch job.
# Usage: examples/slurm/plan.sh [OUT], from the root of this repository.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
out=${1:-slurm_run}
planner=${PLANNER:-python -m tools.planner}
inputs="--cluster $here/cluster.yaml --model $here/model.yaml"
mkdir -p "$out"

# Without a profile the planner uses datasheet figures. On one node of each kind, measure first:
#   $planner profile --model "$here/model.yaml" --kind A100-40 --out "$out/profile.json"
# and give plan, check and emit --profile "$out/profile.json".
$planner plan $inputs --out "$out/plan.json"
$planner check "$out/plan.json" $inputs
# Mock data to try it with: put the flags of your own data and tokenizer into --extra.
$planner emit "$out/plan.json" $inputs --out "$out/run" --time-limit 12:00:00 --doctor \
    --extra "--mock-data --tokenizer-type NullTokenizer"
echo "Start with: sbatch $out/run/train.sbatch"
