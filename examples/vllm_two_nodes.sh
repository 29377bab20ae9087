#!/usr/bin/env bash
# Two machines with Ray: each matrix of the model is split over both (tensor parallel), each keeps its half of the
# nested weights. The model's folder lies at the same path on both.
#   on the first:   examples/vllm_two_nodes.sh head ADDRESS MODEL [options of vllm serve]
#   on the second:  examples/vllm_two_nodes.sh node ADDRESS [options of ray start]
# ADDRESS is the first machine's, with a port: 10.0.0.1:6379. Needs vLLM, QBE and 'pip install ray' on both, and on the
# second what the first then has in ~/.ray/auth_token: without that token anybody who reaches the port could run code.
# Without GPUs each machine is one worker.
set -euo pipefail
part=$1 address=$2
shift 2
export RAY_AUTH_MODE=token
options=(--disable-usage-stats)
nvidia-smi -L > /dev/null 2>&1 || options+=(--num-gpus 1)
case $part in
  node)
    exec ray start --address "$address" --block "${options[@]}" "$@"
    ;;
  head)
    model=$1
    shift
    ray get-auth-token --generate > /dev/null
    ray start --head --node-ip-address "${address%:*}" --port "${address##*:}" --block "${options[@]}" &
    trap "kill $!" EXIT
    for _ in {1..300}; do # until the second is there
      nodes=$(ray status --address "$address" 2> /dev/null | grep -c ' node_') || true
      [ "$nodes" -lt 2 ] || break
      sleep 1
    done
    [ "$nodes" -ge 2 ] || { echo "no second machine came within five minutes: start it with 'node $address'" >&2; exit 1; }
    RAY_ADDRESS=$address python -m vllm.entrypoints.openai.api_server --model "$model" --served-model-name model \
      --quantization qbe --middleware qbe.vllm.service_tier.ServiceTier \
      --tensor-parallel-size 2 --distributed-executor-backend ray "$@"
    ;;
esac
