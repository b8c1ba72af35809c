"""Who holds which device, and whose that is: kubelet, Kubernetes API, Slurm, device ids, processes and cgroups."""
