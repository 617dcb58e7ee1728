#!/usr/bin/env bash
# Tests on an emulated Arm CPU, with PyTorch's wheel for it and csrc/ cross-compiled:
#
#   bash tests/compile/on_arm.sh FOLDER tests/ops/test_linear.py -k "not triton"
#
# FOLDER keeps Python and the wheels, 5 GB, which the first run fetches. For Debian 12, with
#   dpkg --add-architecture arm64 && apt-get update
#   apt-get install qemu-user-static g++-aarch64-linux-gnu ninja-build
set -euo pipefail

repository=$(cd "$(dirname "$0")/../.." && pwd)
mkdir -p "$1" && cd "$1" && shift
python=(env OMP_NUM_THREADS=1 "PYTHONPATH=$PWD/site" qemu-aarch64-static -cpu neoverse-n1
  -L "$PWD/sysroot" "$PWD/sysroot/usr/bin/python3.11")

if [ ! -e fetched ]; then
  rm -rf packages sysroot site
  mkdir -p packages sysroot
  names=(libbz2-1.0 libc6 libexpat1 libffi8 libgcc-s1 libgomp1 liblzma5 libpython3.11-minimal
    libpython3.11-stdlib libsqlite3-0 libssl3 libstdc++6 libuuid1 python3.11-minimal zlib1g)
  (cd packages && apt-get download "${names[@]/%/:arm64}")
  for package in packages/*.deb; do dpkg -x "$package" sysroot; done
  platforms=(--platform manylinux2014_aarch64)
  for glibc in {17..34}; do platforms+=(--platform "manylinux_2_${glibc}_aarch64"); done
  python3 -m pip install --target site "${platforms[@]}" --only-binary=:all: --python-version 3.11 \
    --constraint "$repository/constraints.txt" torch numpy transformers pytest hypothesis setuptools
  # PyTorch looks here for what the CPU is and has; QEMU would show it the host's.
  midr=sysroot/sys/devices/system/cpu/cpu0/regs/identification/midr_el1
  mkdir -p sysroot/proc "$(dirname $midr)"
  echo 0x00000000413fd0c1 > $midr
  cat > sysroot/proc/cpuinfo << 'EOF'
processor : 0
Features : fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm asimddp
CPU implementer : 0x41
CPU architecture: 8
CPU variant : 0x3
CPU part : 0xd0c
CPU revision : 1
EOF
  touch fetched
fi

rm -rf tree && mkdir tree
(cd "$repository" && git ls-files -z | xargs -0 cp --parents -t "$OLDPWD/tree")
cd tree
ln -s ../triton_kernels fastplm/triton_kernels
# The emulated Python starts the compiler of this machine, which compiles for Arm, and no CUDA.
CXX=aarch64-linux-gnu-g++ CUDA_HOME=none "${python[@]}" setup.py --quiet build_ext --inplace
"${python[@]}" -c 'from fastplm import _extension; assert _extension._MISSING is None, _extension._MISSING'
exec "${python[@]}" -m pytest -p no:cacheprovider "$@"
