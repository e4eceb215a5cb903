#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Builds the patched llama.cpp. A build that was interrupted goes on where it stopped.
#   build.sh cpu|sm60 SOURCE BUILD [JOBS]   configure, build, run test-pn-format
#   build.sh install SOURCE BUILD TARGET    server, tools and licences into TARGET
#   build.sh seal VERSION SOURCE TARGET     VERSION, PROVENANCE.md and SHA256SUMS
set -eu

# Commits of a repository that happens to lie around the source are not the engine's: each new one would change a
# definition and compile everything again.
GIT_CEILING_DIRECTORIES=$(cd "$(dirname "${2:-.}")" && pwd)
export GIT_CEILING_DIRECTORIES

# The documented configuration of the engine image.
common="-DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=OFF -DGGML_AVX=ON -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON
 -DGGML_CCACHE=OFF -DLLAMA_BUILD_TESTS=ON -DLLAMA_BUILD_SERVER=ON -DLLAMA_BUILD_TOOLS=ON -DLLAMA_BUILD_EXAMPLES=OFF
 -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_BUILD_MTMD=OFF
 -DCMAKE_BUILD_RPATH_USE_ORIGIN=ON -DCMAKE_PLATFORM_NO_VERSIONED_SONAME=ON"
cuda="-DGGML_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES=60-real -DGGML_CUDA_FA=ON -DGGML_CUDA_FA_ALL_QUANTS=OFF
 -DGGML_CUDA_GRAPHS=OFF -DGGML_CUDA_NO_VMM=ON -DGGML_CUDA_COMPRESSION_MODE=size"
quants="q4_0-q4_0;q8_0-q8_0;f16-f16;bf16-bf16;f16-q8_0;q8_0-f16;bf16-q8_0;q8_0-bf16"
tools="llama-server llama-quantize llama-perplexity llama-bench llama-completion"

case ${1:-} in
cpu | sm60)
    kind=$1 source=$2 build=$3 jobs=${4:-0}
    [ "$jobs" -gt 0 ] || jobs=$(nproc)
    [ -f "$source/PROVENANCE.md" ] || {
        echo "build.sh: $source holds no patched source; run: python -m engine.patches.apply --output $source" >&2
        exit 1
    }
    # A build that goes on keeps its generator.
    generator="Unix Makefiles"
    if command -v ninja > /dev/null; then generator=Ninja; fi
    if [ -f "$build/CMakeCache.txt" ]; then
        generator=$(sed -n 's/^CMAKE_GENERATOR:INTERNAL=//p' "$build/CMakeCache.txt")
    fi
    if [ "$kind" = sm60 ]; then
        # shellcheck disable=SC2086
        cmake -S "$source" -B "$build" -G "$generator" $common $cuda -DGGML_CUDA_FA_QUANTS="$quants"
    else
        # shellcheck disable=SC2086
        cmake -S "$source" -B "$build" -G "$generator" $common
    fi
    # shellcheck disable=SC2086
    cmake --build "$build" -j "$jobs" --target $tools test-pn-format test-pn-logits
    "$build/bin/test-pn-format" "$source/tests/pn-golden.txt"
    ;;
install)
    source=$2 build=$3 target=$4
    mkdir -p "$target/bin" "$target/LICENSES/engine"
    for tool in $tools; do cp "$build/bin/$tool" "$target/bin/"; done
    find "$build/bin" -name '*.so' -exec cp -P {} "$target/bin/" \;
    cp "$source/LICENSE" "$target/LICENSES/engine/LICENSE"
    cp "$source"/licenses/* "$target/LICENSES/engine/"
    ;;
seal)
    version=$2 source=$3 target=$4
    cp "$source/PROVENANCE.md" "$target/PROVENANCE.md"
    printf '%s\n' "$version" > "$target/VERSION"
    cd "$target"
    find . -type f ! -name SHA256SUMS | LC_ALL=C sort | sed 's|^\./||' | xargs -d '\n' sha256sum > SHA256SUMS
    ;;
*)
    sed -n '3,7s/^# //p' "$0" >&2
    exit 2
    ;;
esac
