#!/bin/sh
# Start Redis after repair_aof.pl has checked its append-only files. If they are damaged, Redis does not start.
# Usage: start.sh [option of redis-server ...]. Set REDIS_DATA to use another folder than /data.
set -eu
here=$(dirname "$0")
data=${REDIS_DATA:-/data}
# Redis creates this folder too, but does not sync its entry: a power loss could remove it with everything inside.
mkdir -p "$data/appendonlydir"
sync "$data"
perl "$here/repair_aof.pl" "$data/appendonlydir"
exec redis-server "$here/redis.conf" --dir "$data" "$@"
