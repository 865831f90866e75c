#!/usr/bin/env bash
# Plans a model for two kinds of nodes and writes a JobSet and a SkyPilot job group.
# Usage: examples/kubernetes/plan.sh [OUT], from the root of this repository. OUT is on a volume that all pods see.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
out=${1:-kubernetes_run}
planner=${PLANNER:-python -m tools.planner}
inputs="--cluster $here/cluster.yaml --model $here/model.yaml"
mkdir -p "$out"
folder=$(cd "$out" && pwd)

$planner plan $inputs --out "$out/plan.json"
$planner check "$out/plan.json" $inputs
# Mock data to try it with: put the flags of your own data and tokenizer into --extra.
for target in jobset skypilot; do
    volume=claim-of-the-lab
    [[ "$target" == jobset ]] || volume=s3://bucket-of-the-lab
    $planner emit "$out/plan.json" $inputs --out "$out/$target" --target "$target" \
        --container registry.example/megatron-het:1 --volume "$volume:$folder" \
        --extra "--mock-data --tokenizer-type NullTokenizer"
done
echo "Start with: kubectl apply -f $out/jobset/jobset.yaml"
