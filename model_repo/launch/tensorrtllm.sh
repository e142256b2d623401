# Starts Triton on this package inside NVIDIA's image: one process of it for each rank of the engine.
#
#   docker run --rm --gpus all --shm-size 2g --ulimit memlock=-1 -v "$PWD":/package:ro -p 127.0.0.1:8000-8002:8000-8002 \
#     -e ADDRESS=0.0.0.0 IMAGE /package/launch.sh
#
# ADDRESS (127.0.0.1), HTTP_PORT, GRPC_PORT, METRICS_PORT: where it listens. TRITON_KEY: the header `trtseek-key` that
# opens the APIs which run code or touch the host (model repository, shared memory, trace, logging); unset, nobody knows
# it. Further arguments are tritonserver's. Put a gateway in front of it: Triton's "Secure Deployment Considerations".
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")" # config.pbtxt names the engine from here

fail() {
  printf 'launch.sh: %s\n' "$*" >&2
  exit 1
}

command -v tritonserver >/dev/null || fail "there is no tritonserver here: start this inside $image"
found="$(python3 -c 'from importlib.metadata import version; print(version("tensorrt_llm"))' 2>/dev/null)" ||
  fail "TensorRT-LLM is not installed here: start this inside $image"
[ "$found" = "$tensorrt_llm" ] ||
  fail "TensorRT-LLM $found is installed, and the engine is of $tensorrt_llm: start this inside $image"
gpus="$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU' || true)"
[ "$gpus" -ge "$ranks" ] || fail "the engine has $ranks rank(s), and $gpus GPU(s) are visible (docker run --gpus all)"

key="${TRITON_KEY:-$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')}"
guarded="model-repository,shared-memory,trace,logging:trtseek-key=$key"
address="${ADDRESS:-127.0.0.1}"
# A stub that loads a tokenizer takes longer than Triton's 30 s at times.
options=(
  "--model-repository=$PWD/model_repository" --disable-auto-complete-config
  "--http-address=$address" "--http-port=${HTTP_PORT:-8000}"
  "--grpc-address=$address" "--grpc-port=${GRPC_PORT:-8001}"
  "--metrics-address=$address" "--metrics-port=${METRICS_PORT:-8002}"
  "--http-restricted-api=$guarded" "--grpc-restricted-protocol=$guarded"
  --backend-config=python,stub-timeout-seconds=300 --exit-timeout-secs=40
  "$@"
)
if [ "$ranks" -eq 1 ]; then
  exec tritonserver "${options[@]}" --backend-config=python,shm-region-prefix-name=rank0_
fi
command -v mpirun >/dev/null || fail "there is no mpirun here, and the engine has $ranks ranks: start this inside $image"
# The first rank serves; the others load the engine alone and follow it, and never come to listen.
command=(mpirun)
[ "$(id -u)" -ne 0 ] || command+=(--allow-run-as-root)
for ((rank = 0; rank < ranks; rank++)); do
  [ "$rank" -eq 0 ] || command+=(:)
  command+=(-n 1 tritonserver "${options[@]}" "--backend-config=python,shm-region-prefix-name=rank${rank}_")
  [ "$rank" -eq 0 ] || command+=(--model-control-mode=explicit --load-model=tensorrt_llm)
done
exec "${command[@]}"
