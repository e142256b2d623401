#!/usr/bin/env bash
# Builds the engine of this job with trtllm-build, on a host with the GPU it is for. README.md says more.
#   ./build.sh [OUTPUT]       OUTPUT: a folder that does not exist yet; ./engine unless given
#   IMAGE=registry/tritonserver:TAG@sha256:… ./build.sh     the same container from elsewhere, or pinned by its digest
# Leaves with 0, or: 2 OUTPUT is there already or the job is no longer whole; 3 the wrong GPU, or none; 4 the wrong
# version of TensorRT-LLM or TensorRT; 5 neither trtllm-build nor docker; 6 trtllm-build failed.
set -euo pipefail

job=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=/dev/null
source "$job/job.env"
image=${IMAGE:-$JOB_IMAGE}

refuse() { # exit code, message
    echo "build.sh: $2" >&2
    exit "$1"
}

check_inputs() {
    (cd -- "$job" && sha256sum --check --quiet --strict SHA256SUMS) ||
        refuse 2 "a file of the job is missing or changed; copy the job again"
}

check_gpu() {
    local found sm
    command -v nvidia-smi > /dev/null || refuse 3 "nvidia-smi is not found: this host has no NVIDIA driver"
    found=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader) || refuse 3 "nvidia-smi finds no GPU"
    (($(wc -l <<< "$found") >= JOB_WORKERS)) || refuse 3 "$JOB_WORKERS ranks are built at once, each on a GPU of its own"
    while read -r sm; do
        [[ ${sm/./} == "$JOB_SM" ]] ||
            refuse 3 "the job is for a $JOB_GPU (SM$JOB_SM), and this host has a GPU of SM${sm/./}: an engine runs only on what it was built on"
    done < <(head -n "$JOB_WORKERS" <<< "$found")
}

read_versions() { # of the Python that trtllm-build runs in: "TensorRT-LLM's TensorRT's"
    local first
    read -r first < "$(command -v trtllm-build)"
    # shellcheck disable=SC2016
    ${first#\#!} -c '
from importlib.metadata import PackageNotFoundError, version
def find(name):
    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"
print(find("tensorrt_llm"), find("tensorrt"))'
}

check_versions() {
    read -r tensorrt_llm tensorrt <<< "$(read_versions)"
    [[ $tensorrt_llm == "$JOB_VERSION" ]] ||
        refuse 4 "the job is for TensorRT-LLM $JOB_VERSION, and this trtllm-build is of $tensorrt_llm: use $JOB_IMAGE"
    [[ $tensorrt == unknown || $tensorrt == "$JOB_TENSORRT" || $tensorrt == "$JOB_TENSORRT".* ]] ||
        refuse 4 "TensorRT-LLM $JOB_VERSION is of TensorRT $JOB_TENSORRT, and this one is $tensorrt"
}

build_here() {
    local output=$1 partial=$1.partial arguments sums
    check_versions
    rm -rf -- "$partial"
    mkdir -p -- "$partial"
    partial=$(cd -- "$partial" && pwd)
    mapfile -t arguments < "$job/arguments"
    # Its timing cache goes to the current folder.
    (cd -- "$partial" && trtllm-build --checkpoint_dir "$job/checkpoint" --output_dir "$partial" "${arguments[@]}") 2>&1 |
        tee -- "$output.log" || refuse 6 "trtllm-build failed; its output is in $output.log"
    mv -- "$output.log" "$partial/build.log"
    rm -f -- "$partial/model.cache"
    printf '{"job": "%s", "tensorrt_llm": "%s", "tensorrt": "%s", "sm": %s, "image": "%s"}\n' \
        "$(sha256sum < "$job/SHA256SUMS" | cut -d ' ' -f 1)" "$tensorrt_llm" "$tensorrt" "$JOB_SM" "${BUILT_IN:-}" \
        > "$partial/receipt.json"
    sums=$(cd -- "$partial" && find . -type f -printf '%P\0' | LC_ALL=C sort -z | xargs -0 sha256sum)
    echo "$sums" > "$partial/SHA256SUMS"
    chmod -R a+rX -- "$partial"
    mv -- "$partial" "$output"
}

build_in_container() {
    local output=$1
    mkdir -p -- "$(dirname -- "$output")"
    docker run --rm --gpus all --ipc host --ulimit memlock=-1 --ulimit stack=67108864 \
        --volume "$job:/job:ro" --volume "$(cd -- "$(dirname -- "$output")" && pwd):/result" \
        --env "BUILT_IN=$image" "$image" bash /job/build.sh "/result/$(basename -- "$output")"
}

output=${1:-engine}
[[ ! -e $output ]] || refuse 2 "$output is there already: remove it, or name another folder"
[[ -d $(dirname -- "$output") || -n ${BUILT_IN:-} ]] || mkdir -p -- "$(dirname -- "$output")"
check_inputs
check_gpu
if command -v trtllm-build > /dev/null; then
    build_here "$output"
elif command -v docker > /dev/null; then
    build_in_container "$output"
else
    refuse 5 "neither trtllm-build nor docker is found: install docker with NVIDIA's container toolkit, or run this in $image"
fi
if [[ -z ${BUILT_IN:-} ]]; then
    echo "build.sh: the engine is in $output; where trtseek is, with every --set of the run that made the job: trtseek engine $JOB_CONFIG --resume $output"
fi
