#!/usr/bin/env bash
# Two servers with QBE behind vllm-router (pip install vllm-router), which sends requests of one conversation to one of
# them, so that its prefixes are reused there. QBE's arguments are in the body and pass through.
#   examples/vllm_router.sh MODEL [options of vllm serve]
set -euo pipefail
model=$1
shift

ports=(8001 8002)
started=()
trap 'kill "${started[@]}"' EXIT
for port in "${ports[@]}"; do
  python -m vllm.entrypoints.openai.api_server --model "$model" --served-model-name model --port "$port" \
    --quantization qbe --middleware qbe.vllm.service_tier.ServiceTier "$@" &
  started+=($!)
done
for port in "${ports[@]}"; do
  until curl -sf "http://127.0.0.1:$port/health"; do
    kill -0 "${started[@]}" || exit 1
    sleep 1
  done
done
vllm-router --worker-urls "${ports[@]/#/http://127.0.0.1:}" --policy consistent_hash --host 127.0.0.1 --port 8000
