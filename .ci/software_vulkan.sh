#!/usr/bin/env bash
# Unpacks a recent Mesa software Vulkan driver into a folder of its own, without changing the system,
# and prints the file for VK_ICD_FILENAMES. Debian 12's own driver is too old for SAPIEN; its
# backports have a newer one. Prints nothing and fails if that is not to be had.
set -euo pipefail
folder=${1:?usage: software_vulkan.sh FOLDER}
command -v apt-get >/dev/null
mirror=$({ cat /etc/apt/sources.list /etc/apt/sources.list.d/* 2>/dev/null || true; } |
  grep -oE 'https?://[^ ]+/debian/?( |$)' | head -n 1 | tr -d ' ')
test -n "$mirror"
release=$(. /etc/os-release && echo "$VERSION_CODENAME")
suite=$release
if [ "$release" = bookworm ]; then suite=bookworm-backports; fi
mkdir -p "$folder/lists/partial" "$folder/cache/archives/partial"
folder=$(cd "$folder" && pwd)
echo "deb $mirror $suite main" >"$folder/sources.list"
private=(-o "Dir::Etc::SourceList=$folder/sources.list" -o Dir::Etc::SourceParts=/dev/null
  -o "Dir::State::Lists=$folder/lists" -o "Dir::Cache=$folder/cache" -o APT::Sandbox::User=root)
apt-get "${private[@]}" -qq update >&2
cd "$folder"
apt-get "${private[@]}" -qq download mesa-vulkan-drivers >&2
dpkg -x mesa-vulkan-drivers_*.deb mesa
library=$(find "$folder/mesa" -name 'libvulkan_lvp.so' | head -n 1)
if ldd "$library" | grep -q 'not found'; then
  # The packages that it depends on come from the system's own release.
  apt-get -qq update >&2
  apt-get -qq install -y libllvm15 libdrm2 libxcb-dri3-0 libxcb-present0 libxcb-randr0 \
    libxcb-sync1 libxcb-xfixes0 libxcb-keysyms1 libxshmfence1 libx11-xcb1 libwayland-client0 \
    libzstd1 libexpat1 >&2
fi
if ldd "$library" | grep 'not found' >&2; then exit 1; fi
icd=$(find "$folder/mesa" -name 'lvp_icd*.json' | head -n 1)
sed "s#\"library_path\": \".*\"#\"library_path\": \"$library\"#" "$icd" >"$folder/lvp_icd.json"
echo "$folder/lvp_icd.json"
