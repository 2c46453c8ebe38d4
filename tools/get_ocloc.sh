#!/usr/bin/env bash
# Intel's offline compiler, as new as Debian packages it, into a folder; `DIR/ocloc` then runs it: tools/get_ocloc.sh DIR [SUITE].
#
# The host's packages stay as they are: the .deb files are only unpacked, and ocloc runs with its own suite's loader and libraries.
# Debian 12's `apt-get install intel-opencl-icd` is simpler, and knows Iris Xe, Arc A and Data Center Max, but nothing newer.
set -euo pipefail
directory=$(realpath -m "$1")
suite=${2:-forky}

mkdir -p "$directory"/apt/{lists,archives}/partial "$directory"/{debs,root}
archive=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' | grep -v security | sort -u | head -1)
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $archive $suite main" > "$directory"/apt/sources.list
touch "$directory"/apt/status

apt() {
    apt-get -qq -o Dir::Etc::sourcelist="$directory"/apt/sources.list -o Dir::Etc::sourceparts=/dev/null \
        -o Dir::Etc::preferencesparts=/dev/null -o Dir::State::lists="$directory"/apt/lists -o Dir::Cache="$directory"/apt \
        -o Dir::State::status="$directory"/apt/status -o APT::Sandbox::User=root "$@"
}

apt update
cd "$directory"/debs
apt download intel-ocloc libigc2 libigdfcl2 libc6 libgcc-s1 libstdc++6 zlib1g libzstd1 libxml2-16 liblzma5
for package in *.deb; do
    dpkg -x "$package" "$directory"/root
done

libraries=$directory/root/usr/lib/x86_64-linux-gnu
program=$(ls "$directory"/root/usr/bin/ocloc* | head -1)
printf '#!/bin/sh\nexec %s --library-path %s %s "$@"\n' "$libraries/ld-linux-x86-64.so.2" "$libraries" "$program" > "$directory"/ocloc
chmod +x "$directory"/ocloc
"$directory"/ocloc --version
