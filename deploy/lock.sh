#!/bin/sh
# Write the lock files of the image again, with the newest versions. Needs uv. Run it at the root of the repository.
# For another image, choose other extras and another file: `sh deploy/lock.sh deploy/onnx.lock postgres client onnx`.
set -eu
file=${1:-deploy/requirements.lock}
[ $# -gt 0 ] && shift
[ $# -gt 0 ] || set -- postgres client transformers
export UV_CUSTOM_COMPILE_COMMAND="sh deploy/lock.sh $file $*"

lock() {
    uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-annotate "$@"
}

extras=
for extra in "$@"; do
    extras="$extras --extra $extra"
done
# shellcheck disable=SC2086
lock --upgrade $extras --output-file "$file" pyproject.toml
python3 -c "
import tomllib
print(*tomllib.load(open('pyproject.toml', 'rb'))['build-system']['requires'], sep='\n')
" | lock --upgrade --output-file deploy/build.lock -
