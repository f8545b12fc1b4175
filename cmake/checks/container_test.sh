#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs the RUN lines of the Containerfile in a bare Debian tree, without a container engine: it
# proves that they suffice on a system that has nothing.
# usage: container_test.sh SOURCE FOLDER [NUMBER]
#   NUMBER: only so many of the RUN lines
#
# It needs root, debootstrap and Debian's packages; exit code 77, a skip, where one is missing. It
# downloads about 1 GB and builds everything.
set -euo pipefail
source=$1 folder=$2 most=${3:-1000}
skip() { echo "SKIPPED: $*"; exit 77; }
fail() { echo "FAILED: $*"; exit 1; }
[[ $(id -u) -eq 0 ]] || skip "needs root, to make a Debian tree"
command -v debootstrap >/dev/null || skip "no debootstrap; apt-get install debootstrap"
mirror=${ISOSHARD_DEBIAN_MIRROR:-http://deb.debian.org/debian}

root=$folder/root
mounts=()
clean_up() {
  local mount
  for mount in "${mounts[@]}"; do umount -l -- "$mount" 2>/dev/null || true; done
}
trap clean_up EXIT
rm -rf --one-file-system -- "$folder"
mkdir -p -- "$folder"
debootstrap --variant=minbase bookworm "$root" "$mirror" >"$folder/debootstrap.log" 2>&1 || {
  tail -n 5 "$folder/debootstrap.log"
  skip "debootstrap could not make a tree from $mirror"
}
for name in proc sys dev; do
  mount --rbind "/$name" "$root/$name" 2>/dev/null || skip "cannot mount /$name below $root"
  mount --make-rslave "$root/$name"
  mounts+=("$root/$name")
done
cp /etc/resolv.conf "$root/etc/resolv.conf"
# How this machine reaches Debian's and Python's packages.
[[ -d /etc/apt/apt.conf.d ]] && cp -r /etc/apt/apt.conf.d/. "$root/etc/apt/apt.conf.d/"
for file in /etc/pip.conf; do [[ -f $file ]] && cp "$file" "$root$file"; done
for folder_of_certificates in /usr/local/share/ca-certificates /etc/ssl/certs; do
  [[ -d $folder_of_certificates ]] || continue
  mkdir -p -- "$root$folder_of_certificates"
  cp -rL "$folder_of_certificates/." "$root$folder_of_certificates/" 2>/dev/null || true
done

# What COPY brings: what git has of the checkout.
grep -q '^COPY \. /opt/isoshard$' "$source/Containerfile" || fail "COPY must bring /opt/isoshard"
mkdir -p -- "$root/opt/isoshard"
git -C "$source" ls-files -z | tar -C "$source" --null -T - -c | tar -C "$root/opt/isoshard" -x

environment=(HOME=/root PATH=/opt/isoshard:/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8)
while read -r name; do [[ -n ${!name:-} ]] && environment+=("$name=${!name}"); done < <(
  printf '%s\n' http_proxy https_proxy no_proxy PIP_INDEX_URL PIP_TRUSTED_HOST SSL_CERT_FILE \
    REQUESTS_CA_BUNDLE PIP_CERT)
while read -r line; do
  for setting in ${line#ENV }; do [[ $setting == PATH=* ]] || environment+=("$setting"); done
done < <(grep -E '^ENV [A-Z_]+=[^"]*$' "$source/Containerfile")

number=0
while IFS= read -r line; do
  ((number < most)) || break
  number=$((number + 1))
  echo "RUN $line"
  chroot "$root" env -i "${environment[@]}" bash -c "cd /opt/isoshard && $line" \
    >"$folder/run.$number.log" 2>&1 || {
    tail -n 30 "$folder/run.$number.log"
    fail "RUN line $number ended with an error"
  }
done < <(sed -n 's/^RUN //p' "$source/Containerfile")
((number > 0)) || fail "the Containerfile must have RUN lines"
if ((number < most)); then
  grep -q '1 of 1 case conforms\|cases conform' "$folder/run.$number.log" \
    || fail "the last RUN line must end with a verdict: $(tail -n 3 "$folder/run.$number.log")"
fi
echo "$number RUN lines ran"
