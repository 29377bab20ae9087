#!/usr/bin/env bash
# Two machines without Ray, by vLLM's own multi-node mode.
#   on the first:   examples/vllm_two_nodes_mp.sh 0 ADDRESS MODEL [options of vllm serve]
#   on the second:  examples/vllm_two_nodes_mp.sh 1 ADDRESS MODEL [the same options]
# ADDRESS is the first machine's. The model's folder lies at the same path on both.
set -euo pipefail
rank=$1 address=$2 model=$3
shift 3
options=(--quantization qbe --tensor-parallel-size 2 --distributed-executor-backend mp
  --nnodes 2 --node-rank "$rank" --master-addr "$address" "$@")
if [ "$rank" = 0 ]; then
  exec vllm serve "$model" --served-model-name model --middleware qbe.vllm.service_tier.ServiceTier "${options[@]}"
else
  exec vllm serve "$model" --headless "${options[@]}"
fi
