#!/bin/bash
# Slurm epilog: takes the job out of the files that the prolog next to this file wrote; a file without a job goes.
#   install -m 0755 deploy/slurm/epilog.sh /etc/slurm/epilog.d/50-gpu-cost-exporter.sh
#   slurm.conf: Epilog=/etc/slurm/epilog.d/*
# It always succeeds: an epilog that fails drains the node.
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
