# Runs as root inside a throw-away copy of the host tree: imports /lab/image into an empty /var/lib/docker.
dockerd --config-file /lab/daemon.json >/tmp/dockerd.log 2>&1 &
daemon=$!
tries=0
until docker version >/dev/null 2>&1; do
    tries=$((tries + 1))
    if [ "$tries" -gt 300 ] || ! kill -0 "$daemon"; then
        tail -20 /tmp/dockerd.log >&2
        exit 1
    fi
    sleep 0.1
done
set --
while read -r change; do
    set -- "$@" --change "$change"
done <<END
$CHANGES
END
tar -C /lab/image --sort=name --numeric-owner -c . | docker import "$@" - "$IMAGE"
kill "$daemon"
wait "$daemon" || true
rm -rf /var/lib/docker/tmp /var/lib/docker/runtimes
