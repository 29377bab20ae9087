#!/usr/bin/env bash
# One machine: vLLM's server with QBE, and four requests at four precisions in one batch.
#   examples/vllm_serve.sh MODEL [options of vllm serve]
# MODEL is a folder that 'qbe quantize' wrote, or a 16-bit checkpoint. Needs vLLM ('make setup-vllm' for the CPU).
set -euo pipefail
model=$1 port=${PORT:-8000}
shift

python -m vllm.entrypoints.openai.api_server --model "$model" --served-model-name model --port "$port" \
  --quantization qbe --middleware qbe.vllm.service_tier.ServiceTier "$@" &
server=$!
trap 'kill $server' EXIT
until curl -sf "http://127.0.0.1:$port/health"; do
  kill -0 $server || exit 1 # it says why
  sleep 1
done

ask() {
  curl -sS "http://127.0.0.1:$port/v1/completions" -H 'content-type: application/json' -d "{
    \"model\": \"model\", \"prompt\": \"The capital of France is\", \"max_tokens\": 16, \"temperature\": 0, $1}"
  echo
}
asked=()
for bits in 4 6 8 16; do
  ask "\"vllm_xargs\": {\"qbe_bits\": $bits, \"qbe_policy\": \"uniform\"}" &
  asked+=($!)
done
wait "${asked[@]}"
ask '"service_tier": "flex"'
curl -sS "http://127.0.0.1:$port/metrics" | grep '^qbe:requests_total'
