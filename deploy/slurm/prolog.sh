#!/bin/bash
# Slurm prolog: adds the job to a file for each of its GPUs, as gpu-cost-exporter and dcgm-exporter read them (job-mapping-dir).
#   install -m 0755 deploy/slurm/prolog.sh /etc/slurm/prolog.d/50-gpu-cost-exporter.sh
#   slurm.conf: Prolog=/etc/slurm/prolog.d/*
# slurmd runs it as root on each node of a job. It always succeeds: a prolog that fails drains the node.
folder=${GPU_COST_EXPORTER_JOB_MAPPING_DIR:-/run/gpu-jobs}
[ -n "$SLURM_JOB_GPUS" ] && mkdir -p "$folder" || exit 0
# Jobs that share a GPU (MPS, shards) may start and end at the same time.
exec 9> "$folder/.lock" && flock -w 10 9
for gpu in ${SLURM_JOB_GPUS//,/ }; do
  # Renamed, so that nobody reads half of a file.
  { cat "$folder/$gpu" 2> /dev/null; echo "$SLURM_JOB_ID"; } | sort -u > "$folder/.$gpu.new"
  mv "$folder/.$gpu.new" "$folder/$gpu"
done
exit 0
