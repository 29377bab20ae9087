#!/usr/bin/env bash
# Two machines with Ray: each matrix of the model is split over both (tensor parallel), each keeps its half of the
# nested weights. The model's folder lies at the same path on both.
#   on the first:   examples/vllm_two_nodes.sh head ADDRESS MODEL [options of vllm serve]
#   on the second:  examples/vllm_two_nodes.sh node ADDRESS [options of ray start]
# ADDRESS is the first machine's, with a port: 10.0.0.1:6379. Needs vLLM, QBE and 'pip install ray' on both. Without
# GPUs each machine is told to be one worker. One machine can be both, with '--node-ip-address 127.0.0.2' for the second.
set -euo pipefail
part=$1 address=$2
shift 2
options=(--disable-usage-stats)
nvidia-smi -L > /dev/null 2>&1 || options+=(--num-gpus 1)
case $part in
  node)
    exec ray start --address "$address" --block "${options[@]}" "$@"
    ;;
  head)
    model=$1
    shift
    ray start --head --node-ip-address "${address%:*}" --port "${address##*:}" "${options[@]}"
    trap 'ray stop' EXIT
    until [ "$(ray status --address "$address" | grep -c ' node_')" -ge 2 ]; do sleep 1; done
    RAY_ADDRESS=$address python -m vllm.entrypoints.openai.api_server --model "$model" --served-model-name model \
      --quantization qbe --middleware qbe.vllm.service_tier.ServiceTier \
      --tensor-parallel-size 2 --distributed-executor-backend ray "$@"
    ;;
esac
