# Starts Triton on this package inside an image of NVIDIA's with TensorRT-LLM's LLM API (1.3 and later; 1.2 has it too).
#
#   docker run --rm --gpus all --shm-size 2g --ulimit memlock=-1 -v "$PWD":/package:ro -p 127.0.0.1:8000-8002:8000-8002 \
#     -e ADDRESS=0.0.0.0 IMAGE /package/launch.sh
#
# MODELS: where the image keeps the Triton model `llmapi`, whose model.yaml this package has. ADDRESS (127.0.0.1),
# HTTP_PORT, GRPC_PORT, METRICS_PORT: where it listens. TRITON_KEY: the header `trtseek-key` that opens the APIs which
# run code or touch the host; unset, nobody knows it. Further arguments are tritonserver's. Put a gateway in front of it:
# Triton's "Secure Deployment Considerations".
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")" # model.yaml names the checkpoint from here

fail() {
  printf 'launch.sh: %s\n' "$*" >&2
  exit 1
}

command -v tritonserver >/dev/null || fail "there is no tritonserver here: start this inside NVIDIA's image"
models="${MODELS:-/app/all_models/llmapi}"
[ -f "$models/tensorrt_llm/1/model.py" ] || fail "$models holds no model tensorrt_llm: set MODELS to the image's llmapi"
gpus="$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU' || true)"
[ "$gpus" -ge "$ranks" ] || fail "$ranks GPU(s) are asked for, and $gpus are visible (docker run --gpus all)"

repository="$(mktemp -d)"
trap 'rm -rf -- "$repository"' EXIT
cp -R -- "$models/tensorrt_llm" "$repository/"
cp -- model_repository/tensorrt_llm/1/model.yaml "$repository/tensorrt_llm/1/model.yaml"

key="${TRITON_KEY:-$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')}"
guarded="model-repository,shared-memory,trace,logging:trtseek-key=$key"
address="${ADDRESS:-127.0.0.1}"
# Its model completes its own config (decoupled or not) from model.yaml. Loading a large checkpoint takes minutes.
tritonserver "--model-repository=$repository" \
  "--http-address=$address" "--http-port=${HTTP_PORT:-8000}" \
  "--grpc-address=$address" "--grpc-port=${GRPC_PORT:-8001}" \
  "--metrics-address=$address" "--metrics-port=${METRICS_PORT:-8002}" \
  "--http-restricted-api=$guarded" "--grpc-restricted-protocol=$guarded" \
  --backend-config=python,stub-timeout-seconds=3600 --exit-timeout-secs=40 "$@" &
server=$!
trap 'kill -TERM "$server" 2>/dev/null || true' TERM INT
wait "$server" || status=$?
# A signal ends the first wait, not the server.
wait "$server" 2>/dev/null || status=$?
exit "${status:-0}"
