#!/usr/bin/env bash
# compute-sanitizer over the copy kernels, every layout: bad addresses, races, reads of memory that
# nothing wrote. Usage: sanitize.sh OUT; writes OUT/sanitize.json and a log per tool.
set -uo pipefail
out=$(mkdir -p "$1" && cd "$1" && pwd)
cd "$(dirname "$0")/../.."
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
failed=0
lines=()
for tool in memcheck racecheck initcheck synccheck; do
  # initcheck takes PyTorch's caching allocator for one block of memory that was written once.
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 timeout 90 "$sanitizer" --tool "$tool" --error-exitcode 9 \
    python3 tests/gpu_client/kernel_worker.py cuda >"$out/sanitize_$tool.log" 2>&1
  code=$?
  summary=$(grep -E "SUMMARY" "$out/sanitize_$tool.log" | tail -1 | sed 's/^=* *//; s/"/\\"/g')
  lines+=("\"$tool\": {\"exit\": $code, \"summary\": \"$summary\"}")
  [ "$code" -eq 0 ] || failed=1
done
(IFS=,; echo "{${lines[*]}}") >"$out/sanitize.json"
cat "$out/sanitize.json"
exit "$failed"
