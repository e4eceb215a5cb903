#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Unpacks a CUDA 12.4 compiler for sm_60 into DIR without installing anything and without a GPU.
# CUDA 13 dropped Pascal, and PyPI's nvidia-cuda-nvcc-cu12 holds no nvcc: the compiler proper comes from
# Debian's non-free section, headers and runtime come from PyPI. Usage: toolchain.sh DIR [PYTHON]
set -eu
dir=${1:?usage: toolchain.sh DIR [PYTHON]}
python=${2:-python3}
mirror=${DEBIAN_MIRROR:-http://deb.debian.org/debian}
mkdir -p "$dir/work/apt/lists/partial" "$dir/work/apt/archives/partial" "$dir/work/whl" "$dir/work/root"
dir=$(cd "$dir" && pwd)
work=$dir/work
if [ -x "$dir/bin/nvcc" ]; then
    echo "already there: $dir/bin/nvcc"
    exit 0
fi

# An apt configuration of its own: the machine's sources stay as they are.
echo "deb $mirror trixie main contrib non-free non-free-firmware" > "$work/sources.list"
opts="-oDir::Etc::sourcelist=$work/sources.list -oDir::Etc::sourceparts=/dev/null
 -oDir::State::lists=$work/apt/lists -oDir::Cache::archives=$work/apt/archives
 -oDir::Cache::pkgcache= -oDir::Cache::srcpkgcache= -oAPT::Sandbox::User=root"
apt-get -q $opts update
(cd "$work" && apt-get -q $opts download nvidia-cuda-toolkit)
for deb in "$work"/*.deb; do
    dpkg -x "$deb" "$work/root"
done
"$python" -m pip download -q --no-deps -d "$work/whl" nvidia-cuda-runtime-cu12==12.4.127 \
    nvidia-cuda-nvcc-cu12==12.4.131 nvidia-cuda-cccl-cu12==12.4.127.post1 nvidia-cublas-cu12==12.4.5.8
for wheel in "$work"/whl/*.whl; do
    case $wheel in
        *cublas*) "$python" -m zipfile -e "$wheel" "$work/cublas" && rm -f "$wheel" ;;
        *) "$python" -m zipfile -e "$wheel" "$work/pip" ;;
    esac
done

mkdir -p "$dir/bin" "$dir/include" "$dir/lib64" "$dir/nvvm/bin" "$dir/nvvm/libdevice"
root=$work/root/usr
for tool in nvcc cudafe++ fatbinary nvlink ptxas cuobjdump nvdisasm; do
    found=$(find "$root" -type f -name "$tool" | head -1)
    cp "$found" "$dir/bin/"
done
cp "$(find "$root" -type f -name cicc | head -1)" "$dir/nvvm/bin/"
cp "$(find "$work" -name 'libdevice.10.bc' | head -1)" "$dir/nvvm/libdevice/"
cp -r "$work"/pip/nvidia/cuda_runtime/include/. "$work"/pip/nvidia/cuda_nvcc/include/. \
    "$work"/pip/nvidia/cuda_cccl/include/. "$work"/cublas/nvidia/cublas/include/. "$dir/include/"
cp -r "$work"/pip/nvidia/cuda_runtime/lib/. "$dir/lib64/"
ln -sf libcudart.so.12 "$dir/lib64/libcudart.so"
ar rc "$dir/lib64/libcudadevrt.a"
chmod +x "$dir"/bin/* "$dir/nvvm/bin/cicc"
cat > "$dir/bin/nvcc.profile" <<'P'
TOP             = $(_HERE_)/..
NVVMIR_LIBRARY_DIR = $(TOP)/nvvm/libdevice
CICC_PATH       = $(TOP)/nvvm/bin
PATH           += $(TOP)/nvvm/bin:$(_HERE_):
INCLUDES       += "-I$(TOP)/include" $(_SPACE_)
LIBRARIES      =+ $(_SPACE_) "-L$(TOP)/lib64" $(_SPACE_)
CUDAFE_FLAGS   +=
PTXAS_FLAGS    +=
P
rm -rf "$work"
"$dir/bin/nvcc" --version | tail -2
