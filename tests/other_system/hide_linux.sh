#!/bin/sh
# hide_linux.sh DIRECTORY COMMAND...: run it without /proc and /dev/shm. In a mount namespace of its own (unshare -m).
set -e
mount -t tmpfs tmpfs "$1"
for name in null zero random urandom; do
  touch "$1/$name"
  mount --bind "/dev/$name" "$1/$name"
done
mount --rbind "$1" /dev
mount -t tmpfs tmpfs /proc
shift
exec "$@"
