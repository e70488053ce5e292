#!/bin/sh
# Start Redis on a file that is whole: what a crash left of an unfinished transaction is cut off first.
# If the file cannot be mended this ends with an error, and Redis does not start on half of it.
# Usage: start.sh [option of redis-server ...]; REDIS_DATA is another folder than /data.
set -eu
here=$(dirname "$0")
data=${REDIS_DATA:-/data}
for manifest in "$data"/appendonlydir/*.manifest; do
    if [ -e "$manifest" ]; then
        echo y | redis-check-aof --fix "$manifest"
    fi
done
exec redis-server "$here/redis.conf" --dir "$data" "$@"
