#!/usr/bin/env bash
# Plans a model for long sequences, cut into slices, and writes what starts it.
# Usage: examples/long_context/plan.sh [OUT], from the root of this repository.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
out=${1:-long_context_run}
planner=${PLANNER:-python -m tools.planner}
inputs="--cluster $here/cluster.yaml --model $here/model.yaml"
mkdir -p "$out"

# Without a profile the planner uses datasheet figures. On one node of each kind, measure first:
#   $planner profile --model "$here/model.yaml" --kind H100-SXM --slice-tokens 8192 --out "$out/profile.json"
# and give plan, check and emit --profile "$out/profile.json".
$planner plan $inputs --schedules slimpipe --out "$out/plan.json"
$planner check "$out/plan.json" $inputs
# Mock data to try it with: put the flags of your own data and tokenizer into --extra.
$planner emit "$out/plan.json" $inputs --out "$out/run" \
    --extra "--mock-data --tokenizer-type NullTokenizer"
echo "Start the scripts in $out/run, one on each node."
