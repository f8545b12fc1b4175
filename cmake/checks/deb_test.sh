#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes the Debian package of a build and uses what is in it, from a folder that is not /usr.
# usage: deb_test.sh BUILD FOLDER
set -euo pipefail
build=$1 folder=$2
for tool in cpack dpkg-deb dpkg-shlibdeps; do
  command -v $tool >/dev/null || { echo "SKIPPED: no $tool, which makes Debian packages"; exit 77; }
done
rm -rf -- "$folder"
mkdir -p -- "$folder/root"
fail() { echo "FAILED: $*"; exit 1; }

(cd -- "$build" && cpack -G DEB -B "$folder/packages" \
  -D CPACK_DEBIAN_COMPRESSION_TYPE=none >"$folder/cpack.log" 2>&1) \
  || { tail -n 20 "$folder/cpack.log"; fail "cpack ended with an error"; }
deb=$(find "$folder/packages" -maxdepth 1 -name '*.deb')
[[ $(wc -l <<<"$deb") -eq 1 && -s $deb ]] || fail "there must be one package, got: $deb"
echo "package: $(basename -- "$deb"), $(stat -c %s -- "$deb") bytes"

depends=$(dpkg-deb -f "$deb" Depends)
[[ $depends == *libc6* && $depends == *libfmt* ]] \
  || fail "it must depend on its libraries: $depends"
dpkg-deb -x "$deb" "$folder/root"
usr=$folder/root/usr
for file in bin/isoshard bin/isoshard-judge lib/isoshard/libtorch_cpu.so \
  share/man/man1/isoshard.1 share/man/man1/isoshard-verify.1 share/man/man1/isoshard-judge.1 \
  share/bash-completion/completions/isoshard share/fish/vendor_completions.d/isoshard.fish \
  share/zsh/vendor-completions/_isoshard share/isoshard/kjv_genesis_to_joshua.txt; do
  [[ -s $usr/$file || -s $usr/$file.gz ]] || fail "/usr/$file must be in the package"
done
find "$usr" -name 'libisoshard_stats.so.1' | grep -q . \
  || fail "libisoshard_stats.so.1 must be there"

# Nothing of the machine that built it is looked for.
run_path=$(readelf -d "$usr/bin/isoshard" | sed -n 's/.*R\(UN\)\?PATH.*\[\(.*\)\].*/\2/p')
[[ $run_path == '$ORIGIN/../lib/isoshard' ]] || fail "its libraries are looked for in $run_path"
ldd "$usr/bin/isoshard" | grep -E 'libtorch_cpu|libc10' | grep -qv "$usr" \
  && fail "LibTorch must be that of the package: $(ldd "$usr/bin/isoshard")"
"$usr/bin/isoshard" verify --preset small --subjects ddp --dp 2 --dtype fp32 >"$folder/verify.txt" \
  || { cat "$folder/verify.txt"; fail "the program of the package must verify"; }
grep -q '1 of 1 case conforms' "$folder/verify.txt" || fail "$(cat "$folder/verify.txt")"
"$usr/bin/isoshard-judge" --version || fail "isoshard-judge of the package must run"
echo "all is well"
