"""Preparing a data set in restartable stages: tasks that read files and write files, in any order and on any machine.

`plan` divides the input into pieces. The stages are `pieces` (text becomes tokens), with near-duplicates `duplicates` (buckets,
then clusters), then `shards` (documents get their places, then the shards are written). `engines` runs the tasks of a stage in
processes or on a Ray cluster, and `run` joins the results. The data set is that of one process, byte for byte.
"""
