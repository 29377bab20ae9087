#!/usr/bin/env bash
# What only a machine with a GPU can show; continuous integration has none.
#   scripts/gpu_check.sh OUT STEP...
# Runs the steps one after the other. Each writes OUT/STEP.log (and .json) while it runs, so that what is there when it
# is broken off counts; the exit code is that of the first step that failed. Steps for which there are several GPUs may
# run side by side, each script with a CUDA_VISIBLE_DEVICES of its own.
#   suite       all tests, in WORKERS (8) processes; a process whose CUDA context is broken is ended, with the test named
#   sanitize    compute-sanitizer over the kernels' tests
#   vllm        the tests inside vLLM (two GPUs, PYTHON has vLLM)
#   agreement   SmolLM2 inside vLLM beside the embedded engine, float32 and bfloat16 (PYTHON has vLLM; MODEL)
#   throughput  vLLM's server with and without QBE (PYTHON has vLLM; MODEL)
#   cascade     what monitor and cascade cost in a step (MODEL may be set)
#   linears, batch, decode, prefill, switch, kv, speculate   `qbe bench`; speculate needs the default model in the cache
#               (`qbe pull`), whose answers it plays again
# PYTHON (python3) has QBE installed, or what it needs: this tree's entry points are then written beside it. LIMIT (600) is the most seconds of a step.
set -uo pipefail
cd "$(dirname "$0")/.."
[ $# -ge 2 ] || { echo "usage: $0 OUT STEP...; the head of this file lists the steps" >&2 && exit 2; }
out=$(mkdir -p "$1" && cd "$1" && pwd) || exit 2
shift
python=${PYTHON:-python3}

step() {
  local model
  case $1 in
  agreement | throughput) model=${MODEL:?set it to a folder of 'qbe quantize'} ;;
  esac
  case $1 in
  suite)
    export QBE_TEST_LOG=$out/suite
    "$python" -m pytest -o addopts= -p gpu_watch -p no:cacheprovider -n "${WORKERS:-8}" --dist worksteal -q tests --ignore tests/inside_vllm
    ;;
  sanitize)
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --target-processes all --error-exitcode 9 "$python" -m pytest \
      -o addopts= -p no:cacheprovider -p no:xdist -v tests/test_difficulty.py tests/test_cascade_kernel.py \
      tests/test_triton_kernel.py tests/test_triton_tiled.py tests/test_bounded_attention.py tests/test_prompt_attention.py \
      tests/test_fused_rows.py tests/test_cuda_attention.py tests/test_cuda_precision.py \
      -k "${KERNELS:-difficulty or cascade or ragged or alone_in_a_mixed or over_many_parts or prompt_attention or cuda_attention or cuda_precision or fused}"
    ;;
  # Triton's float32 products are of TF32 unless told otherwise, and vLLM's attention does not tell.
  vllm) TRITON_F32_DEFAULT=ieee "$python" -m pytest -o addopts= -p no:cacheprovider -p no:xdist -v tests/inside_vllm/test_vllm_server.py ;;
  agreement)
    TRITON_F32_DEFAULT=ieee "$python" -u benchmarks/vllm_agreement.py "$model" --dtype float32 --compile --json "$out/agreement-float32.json" &&
      "$python" -u benchmarks/vllm_agreement.py "$model" --compile --json "$out/agreement-bfloat16.json"
    ;;
  throughput) "$python" -u benchmarks/vllm_throughput.py "$model" --gpu-memory-utilization 0.4 --json "$out/throughput.json" ;;
  cascade)
    "$python" -u benchmarks/cascade.py cost --device cuda --compile --untrained --steps 400 \
      ${MODEL:+--model "$MODEL"} --json "$out/cascade.json"
    ;;
  linears | batch | decode | prefill | switch | kv | speculate) "$python" -u -m qbe bench "$1" --device cuda --json "$out/$1.json" ;;
  *) echo "no step '$1': the head of scripts/gpu_check.sh lists them" && return 2 ;;
  esac
}

# Policies are found by their entry points, which a tree that is not installed has in its egg-info.
"$python" setup.py -q egg_info || exit 2
failed=0
export -f step
export out python PYTHONPATH="$PWD/scripts:$PWD/src${PYTHONPATH:+:$PYTHONPATH}"
for name in "$@"; do
  began=$SECONDS
  timeout "${LIMIT:-600}" bash -c 'step "$0"' "$name" > "$out/$name.log" 2>&1 < /dev/null
  code=$?
  echo "$name: exit code $code after $((SECONDS - began)) s; $(tail -n 1 "$out/$name.log" | cut -c1-200)" | tee -a "$out/summary.txt"
  [ "$failed" != 0 ] || failed=$code
done
exit "$failed"
