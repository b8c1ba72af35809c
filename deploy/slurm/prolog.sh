#!/bin/bash
# Slurm prolog: adds the job to a file per GPU, in the format that gpu-cost-exporter and dcgm-exporter read (job-mapping-dir).
#   install -m 0755 deploy/slurm/prolog.sh /etc/slurm/prolog.d/50-gpu-cost-exporter.sh
#   slurm.conf: Prolog=/etc/slurm/prolog.d/*
# slurmd runs it as root on each node of a job. It always exits with 0, because Slurm drains a node if the prolog fails.
folder=${GPU_COST_EXPORTER_JOB_MAPPING_DIR:-/run/gpu-jobs}
[ -n "$SLURM_JOB_GPUS" ] && mkdir -p "$folder" || exit 0
# Jobs that share a GPU (MPS, shards) can start and end at the same time.
exec 9> "$folder/.lock" && flock -w 10 9
for gpu in ${SLURM_JOB_GPUS//,/ }; do
  # The rename is atomic, so that a reader never gets half of a file.
  { cat "$folder/$gpu" 2> /dev/null; echo "$SLURM_JOB_ID"; } | sort -u > "$folder/.$gpu.new"
  mv "$folder/.$gpu.new" "$folder/$gpu"
done
exit 0
