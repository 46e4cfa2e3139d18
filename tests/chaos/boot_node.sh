# The init process of a node: sets it up, and kills everything that runs there once its stdin is closed.
mount -t tmpfs tmpfs /dev/shm && mkdir -m 1777 /dev/shm/tmp &&
printf '127.0.0.1 localhost\n%s %s\n' "$2" "$1" >/dev/shm/tmp/hosts && mount --bind /dev/shm/tmp/hosts /etc/hosts &&
echo "$1" >/proc/sys/kernel/hostname && ip link set lo up && echo up || exit 1
read -r _
found=yes
while [ $found = yes ]; do
  found=no
  for process in /proc/[0-9]*; do
    if [ $process != /proc/$$ ] && [ $process/ns/net -ef /proc/$$/ns/net ]; then
      kill -9 ${process#/proc/} && found=yes
    fi
  done
done 2>/dev/null
