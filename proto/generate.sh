#!/usr/bin/env bash
# Regenerate the Python code of the contract. grpcio-tools 1.71.2: its output loads on protobuf
# 5.29 to 7.x, so also inside vLLM's environment; newer generators' output does not.
set -euo pipefail
cd "$(dirname "$0")/.."
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
"${PYTHON:-python3}" -m grpc_tools.protoc -Ikvstore/proto=proto --python_out="$out" \
    --pyi_out="$out" --grpc_python_out="$out" kvstore/proto/kvstore.proto
cp "$out"/kvstore/proto/kvstore_pb2* proto/
