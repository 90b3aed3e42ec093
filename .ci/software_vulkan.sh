#!/usr/bin/env bash
# software_vulkan.sh DIRECTORY
#
# Unpacks Mesa's software Vulkan driver into DIRECTORY and writes DIRECTORY/environment, which makes
# programs use it once it is sourced. The system stays as it is: apt works in folders of its own.
# SAPIEN needs descriptorBindingPartiallyBound, which Mesa offers on the CPU from version 23 on;
# Debian 12 has 22.3, so there the package comes from backports.
set -euo pipefail

here="$(realpath "${1:?usage: software_vulkan.sh DIRECTORY}")"
mkdir -p "$here"/lists/partial "$here"/cache/archives/partial "$here"/tree "$here"/libraries

# The first mirror of this machine's own suite, from one-line and from deb822 source files.
find_mirror() {
    local suite="$1"
    {
        cat /etc/apt/sources.list /etc/apt/sources.list.d/*.list 2>/dev/null |
            sed -E 's/^[[:space:]]*deb[[:space:]]+(\[[^]]*\][[:space:]]+)?//; /^[[:space:]]*(#|deb-src|$)/d' |
            awk -v suite="$suite" '$2 == suite { print $1 }'
        cat /etc/apt/sources.list.d/*.sources 2>/dev/null |
            awk -v suite="$suite" '
                /^Types:/  { uri = "" }
                /^URIs:/   { uri = $2 }
                /^Suites:/ { for (i = 2; i <= NF; i++) if ($i == suite && uri != "") print uri }'
    } | head -n 1
}

# shellcheck disable=SC1091
suite="$(. /etc/os-release && echo "${VERSION_CODENAME:-}")"
mirror="$(find_mirror "$suite")"
if [ -z "$mirror" ]; then
    echo "no package mirror for '$suite' in /etc/apt: no software Vulkan driver" >&2
    exit 1
fi

options=""
for keyring in /usr/share/keyrings/debian-archive-keyring.{gpg,pgp}; do
    if [ -f "$keyring" ]; then options="[signed-by=$keyring] "; break; fi
done
wanted="$suite"
{
    echo "deb $options$mirror $suite main"
    if [ "$suite" = bookworm ]; then
        echo "deb $options$mirror bookworm-backports main"
    fi
} >"$here/sources.list"
if [ "$suite" = bookworm ]; then wanted=bookworm-backports; fi

apt=(
    apt-get -y -q
    -o "Dir::Etc::SourceList=$here/sources.list"
    -o Dir::Etc::SourceParts=/dev/null
    -o "Dir::State::Lists=$here/lists"
    -o "Dir::Cache=$here/cache"
    -o APT::Sandbox::User=root
    -o Debug::NoLocking=1
    -o Acquire::Retries=3
)
"${apt[@]}" update
# Only downloads: the driver, and whatever of its dependencies this machine lacks.
DEBIAN_FRONTEND=noninteractive "${apt[@]}" -t "$wanted" --no-install-recommends --reinstall \
    --download-only install mesa-vulkan-drivers
for package in "$here"/cache/archives/*.deb; do
    dpkg-deb --extract "$package" "$here/tree"
done

driver="$(find "$here/tree" -name libvulkan_lvp.so | head -n 1)"
description="$(find "$here/tree" -path '*icd.d*' -name 'lvp_icd*.json' | head -n 1)"
if [ -z "$driver" ] || [ -z "$description" ]; then
    echo "the package holds no software Vulkan driver" >&2
    exit 1
fi
sed "s#\"library_path\": *\"[^\"]*\"#\"library_path\": \"$driver\"#" "$description" \
    >"$here/software_vulkan.json"

# Libraries that the driver needs and the system lacks, and no others: a newer copy of one that the
# system has could change how other programs draw.
while true; do
    added=no
    for name in $(LD_LIBRARY_PATH="$here/libraries" ldd "$driver" | awk '/not found/ { print $1 }'); do
        found="$(find "$here/tree" -name "$name" | head -n 1)"
        if [ -z "$found" ]; then
            echo "the driver needs $name, which was not found" >&2
            exit 1
        fi
        ln -sf "$found" "$here/libraries/$name"
        added=yes
    done
    if [ "$added" = no ]; then break; fi
done

{
    echo "export VK_ICD_FILENAMES='$here/software_vulkan.json'"
    if [ -n "$(ls -A "$here/libraries")" ]; then
        echo "export LD_LIBRARY_PATH='$here/libraries'\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}"
    fi
} >"$here/environment"
