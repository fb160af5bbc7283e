#!/bin/bash
# Prepare a data set on a Slurm cluster: an array of jobs that take shares of the text, then a job that joins them.
#
#     bash prepare.sh TEXT DATA TOKENIZER [SHARES]
#
# Everything has to be on storage that all nodes mount at the same path. A share that was preempted or lost its node is queued again;
# shares that are finished are not done again.
set -euo pipefail

text=$1 data=$2 tokenizer=$3 shares=${4:-64}
here=$(cd "$(dirname "$0")" && pwd)

array=$(sbatch --parsable --array="0-$((shares - 1))" "$here/prepare.sbatch" "$text" "$data" "$tokenizer")
sbatch --dependency="afterok:${array%%;*}" "$here/merge.sbatch" "$data"
