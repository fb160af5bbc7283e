#!/bin/bash
# Prepare a data set on a Ray cluster, as a job that goes on when this machine is disconnected.
#
#     bash prepare.sh http://HEAD:8265 TEXT DATA TOKENIZER
#
# TEXT may be an address (s3://...); the folder DATA has to be on storage that all machines mount at the same path.
set -euo pipefail

head=$1 text=$2 data=$3 tokenizer=$4

# The job runs on the head node, with RAY_ADDRESS set, and its tasks on all nodes.
ray job submit --address "$head" --no-wait -- \
    discern prepare "$text" --out "$data" --tokenizer "$tokenizer" --engine ray
