#!/bin/sh
# Unpacks etcd and etcdctl of Debian 13 below the directory $1, on Debian machines of other releases
# too. apt checks the signature. Nothing of the system is changed.
set -eu
mkdir -p "$1"
target=$(cd "$1" && pwd)
test -x "$target/usr/bin/etcdctl" && exit 0
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/lists/partial"
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
echo "deb [signed-by=$keyring] http://deb.debian.org/debian trixie main" > "$work/sources.list"
apt() {
    apt-get -qq -o APT::Sandbox::User=root -o Dir::State::lists="$work/lists" -o Dir::Cache="$work" \
        -o Dir::Etc::sourcelist="$work/sources.list" -o Dir::Etc::sourceparts=/dev/null "$@"
}
apt update
cd "$work"
apt download etcd-server etcd-client
for package in ./*.deb; do dpkg-deb --extract "$package" "$work/root"; done
cp -R "$work/root/." "$target"
