#!/bin/sh
# Checks and measures discern on a machine with a GPU in four minutes, or in --minutes N; on a CPU with smaller networks.
#
#   sh benchmarks/gpu.sh [FOLDER] [options of gpu.py]
#
# Writes FOLDER/gpu.md and FOLDER/gpu.json as results come; FOLDER is $OUT where that is set, otherwise ./gpu. Nothing is installed: PYTHON
# (default python3) must have torch, numpy, safetensors and jaxtyping. Where it lacks pydantic, unpack its wheels (pydantic,
# pydantic-core, annotated-types, typing-inspection, typing-extensions) into a folder and set PYTHONPATH to it.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
case "${1:-}" in
    "" | -*) folder=${OUT:-gpu} ;;
    *) folder=$1 && shift ;;
esac
# As the command `discern` does: threads that wait do not spin for long.
export GOMP_SPINCOUNT="${GOMP_SPINCOUNT:-1000}"
PYTHONPATH="$root/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 exec "${PYTHON:-python3}" "$root/benchmarks/gpu.py" --out "$folder" "$@"
