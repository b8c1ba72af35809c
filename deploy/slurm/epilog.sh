#!/bin/bash
# Slurm epilog: removes the job from the files that the prolog in this folder writes, and deletes a file without jobs.
#   install -m 0755 deploy/slurm/epilog.sh /etc/slurm/epilog.d/50-gpu-cost-exporter.sh
#   slurm.conf: Epilog=/etc/slurm/epilog.d/*
# It always exits with 0, because Slurm drains a node if the epilog fails.
folder=${GPU_COST_EXPORTER_JOB_MAPPING_DIR:-/run/gpu-jobs}
[ -n "$SLURM_JOB_GPUS" ] && [ -d "$folder" ] || exit 0
exec 9> "$folder/.lock" && flock -w 10 9
for gpu in ${SLURM_JOB_GPUS//,/ }; do
  if grep -vx -e "$SLURM_JOB_ID" "$folder/$gpu" > "$folder/.$gpu.new" 2> /dev/null; then
    mv "$folder/.$gpu.new" "$folder/$gpu"
  else
    rm -f "$folder/.$gpu.new" "$folder/$gpu"
  fi
done
exit 0
