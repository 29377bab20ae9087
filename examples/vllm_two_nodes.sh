#!/usr/bin/env bash
# Two machines with Ray: each matrix of the model is split over both (tensor parallel), each keeps its half of the
# nested weights. The model's folder lies at the same path on both.
#   on the first:   examples/vllm_two_nodes.sh head ADDRESS MODEL [options of vllm serve]
#   on the second:  examples/vllm_two_nodes.sh node ADDRESS
# ADDRESS is the first machine's. Needs vLLM, QBE and 'pip install ray' on both.
set -euo pipefail
part=$1 address=$2
case $part in
  node)
    exec ray start --address "$address:6379" --block
    ;;
  head)
    model=$3
    shift 3
    ray start --head --node-ip-address "$address" --port 6379 --disable-usage-stats
    trap 'ray stop' EXIT
    until [ "$(ray list nodes --filter state=ALIVE --format json | grep -c node_id)" -ge 2 ]; do sleep 1; done
    python -m vllm.entrypoints.openai.api_server --model "$model" --served-model-name model --quantization qbe \
      --middleware qbe.vllm.service_tier.ServiceTier --tensor-parallel-size 2 --distributed-executor-backend ray "$@"
    ;;
esac
