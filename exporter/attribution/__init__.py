"""Who holds which device: kubelet, device ids, processes and cgroups."""
