#!/usr/bin/env bash
# Two servers with QBE behind vllm-router (pip install vllm-router). QBE's arguments are in the body and pass through.
# Requests with the same header X-Session-ID, or the same "user" in the body, go to the same server, where their
# conversation's prefix is cached; without either the router goes by the prompt.
#   examples/vllm_router.sh MODEL [options of vllm serve]
set -euo pipefail
model=$1
shift

ports=(8001 8002)
started=()
trap 'kill "${started[@]}" 2> /dev/null || true' EXIT
for port in "${ports[@]}"; do
  python -m vllm.entrypoints.openai.api_server --model "$model" --served-model-name model --port "$port" \
    --quantization qbe --middleware qbe.vllm.service_tier.ServiceTier "$@" &
  started+=($!)
done
for i in "${!ports[@]}"; do
  until curl -sf "http://127.0.0.1:${ports[$i]}/health"; do
    kill -0 "${started[$i]}" || exit 1 # it says why
    sleep 1
  done
done
vllm-router --worker-urls "${ports[@]/#/http://127.0.0.1:}" --policy consistent_hash --host 127.0.0.1 --port 8000 &
started+=($!)
wait $! # in the background, so that whoever ends this script ends all three
