#!/bin/bash
# Train on one machine of a Ray cluster, with eight GPUs.
#
#     bash pretrain.sh http://HEAD:8265 DATA RUN
#
# Ray chooses a machine with eight free GPUs; both folders have to be on storage that it mounts. `ray job stop` sends SIGTERM, and
# the run saves a checkpoint. The same command continues it.
set -euo pipefail

head=$1 data=$2 run=$3

# Ray kills a job three seconds after SIGTERM unless told otherwise; a checkpoint may take longer.
ray job submit --address "$head" --no-wait --entrypoint-num-gpus 8 \
    --runtime-env-json '{"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "240"}}' -- \
    discern pretrain --preset electra-large --data "$data" --out "$run" --nproc 8 --set train.compile=auto
