{{/* Parts of the agent's pod that depend on the access to the driver; see docs/install.md. Parameter: the root. */}}

{{- define "gpu-cost-exporter.driverEnv" -}}
{{- $driver := .Values.agent.driver -}}
{{- $mode := include "gpu-cost-exporter.driverMode" . -}}
{{- $libraries := list -}}
{{- if eq $mode "runtimeClass" }}
- {name: NVIDIA_VISIBLE_DEVICES, value: all}
- {name: NVIDIA_DRIVER_CAPABILITIES, value: utility}
{{- else if eq $mode "cdi" }}
- {name: NVIDIA_VISIBLE_DEVICES, value: {{ quote $driver.cdi.device }}}
- {name: NVIDIA_DRIVER_CAPABILITIES, value: utility}
{{- else if eq $mode "privileged" }}
{{- $libraries = append $libraries (include "gpu-cost-exporter.driverLibraries" $driver.privileged) }}
{{- end }}
{{- if include "gpu-cost-exporter.hasDcgmLibrary" . }}{{ $libraries = append $libraries "/usr/local/dcgm" }}{{ end }}
{{- with $libraries }}
- {name: LD_LIBRARY_PATH, value: {{ join ":" . | quote }}}
{{- end }}
{{- end -}}

{{/* Whether privileged.hostPath is the library file. */}}
{{- define "gpu-cost-exporter.isLibraryFile" -}}
{{- if contains "libnvidia-ml.so" (base .hostPath) }}true{{ end -}}
{{- end -}}

{{- define "gpu-cost-exporter.driverLibraries" -}}
{{- if or (include "gpu-cost-exporter.isLibraryFile" .) (not .libraryFolder) -}}
/usr/local/nvidia
{{- else -}}
/usr/local/nvidia/{{ trimAll "/" .libraryFolder }}
{{- end -}}
{{- end -}}

{{- define "gpu-cost-exporter.driverMounts" -}}
{{- $driver := .Values.agent.driver -}}
{{- if eq "privileged" (include "gpu-cost-exporter.driverMode" .) }}
{{- if include "gpu-cost-exporter.isLibraryFile" $driver.privileged }}
- {name: driver, mountPath: /usr/local/nvidia/libnvidia-ml.so.1, readOnly: true}
{{- else }}
- {name: driver, mountPath: /usr/local/nvidia, readOnly: true}
{{- end }}
- {name: dev, mountPath: /dev}
{{- else if include "gpu-cost-exporter.mountsDeviceList" . }}
- {name: device-list, mountPath: /var/run/nvidia-container-devices/all, readOnly: true}
{{- end }}
{{- end -}}

{{- define "gpu-cost-exporter.driverVolumes" -}}
{{- $driver := .Values.agent.driver -}}
{{- if eq "privileged" (include "gpu-cost-exporter.driverMode" .) }}
{{- $type := ternary "File" "Directory" (eq (include "gpu-cost-exporter.isLibraryFile" $driver.privileged) "true") }}
- {name: driver, hostPath: {path: {{ quote $driver.privileged.hostPath }}, type: {{ $type }}}}
# The folder, so that device files created after the start of the pod are visible.
- {name: dev, hostPath: {path: /dev, type: Directory}}
{{- else if include "gpu-cost-exporter.mountsDeviceList" . }}
# The runtime reads the path of the mount instead of an environment variable.
- {name: device-list, hostPath: {path: /dev/null, type: CharDevice}}
{{- end }}
{{- end -}}

{{/* Whether the agent runs as uid 0: root owns the kubelet's socket and the state folder. */}}
{{- define "gpu-cost-exporter.isRoot" -}}
{{- if or (include "gpu-cost-exporter.asksKubelet" .) (include "gpu-cost-exporter.keepsState" .) (eq "privileged" (include "gpu-cost-exporter.driverMode" .)) }}true{{ end -}}
{{- end -}}

{{/* Whether the agent locks the node: root owns the lock folder, and a simulated node needs no lock. */}}
{{- define "gpu-cost-exporter.locksNode" -}}
{{- if and (include "gpu-cost-exporter.isRoot" .) (not (include "gpu-cost-exporter.isSimulated" .)) }}true{{ end -}}
{{- end -}}

{{/* Returns the security context of the container, without capabilities. */}}
{{- define "gpu-cost-exporter.agentSecurityContext" -}}
{{- $agent := .Values.agent -}}
{{- $context := dict "readOnlyRootFilesystem" true "seccompProfile" (dict "type" "RuntimeDefault") -}}
{{- $user := ternary 0 65534 (ne "" (include "gpu-cost-exporter.isRoot" .)) -}}
{{- $_ := set $context "runAsUser" $user -}}
{{- $_ := set $context "runAsGroup" $user -}}
{{- if $user }}{{ $_ := set $context "runAsNonRoot" true }}{{ end -}}
{{- if include "gpu-cost-exporter.isOpenshift" . -}}
{{- /* SELinux does not allow container_t to write the state folder or, on older releases, to connect to the kubelet's socket. */ -}}
{{- $_ := set $context "seLinuxOptions" (dict "type" "spc_t") -}}
{{- end -}}
{{- if eq "privileged" (include "gpu-cost-exporter.driverMode" .) -}}
{{- $_ := set $context "privileged" true -}}
{{- $_ := unset $context "seccompProfile" -}}
{{- else -}}
{{- $_ := set $context "allowPrivilegeEscalation" false -}}
{{- $_ := set $context "capabilities" (dict "drop" (list "ALL")) -}}
{{- end -}}
{{- toYaml (mergeOverwrite $context ($agent.securityContext | default dict)) -}}
{{- end -}}

{{/* Whether the agent queries the kubelet of the node; a simulated node has its own kubelet. */}}
{{- define "gpu-cost-exporter.asksKubelet" -}}
{{- if and .Values.agent.attribution.enabled (not (include "gpu-cost-exporter.isSimulated" .)) }}true{{ end -}}
{{- end -}}

{{- define "gpu-cost-exporter.hasDcgmLibrary" -}}
{{- if or .Values.agent.dcgm.library.hostPath .Values.agent.dcgm.library.image }}true{{ end -}}
{{- end -}}

{{/* Returns the folder of the engine's Unix socket; empty if the address is not a Unix socket. */}}
{{- define "gpu-cost-exporter.dcgmSocketFolder" -}}
{{- $address := .Values.agent.dcgm.address | default "" -}}
{{- if hasPrefix "unix://" $address }}{{ dir (trimPrefix "unix://" $address) }}{{ else if hasPrefix "/" $address }}{{ dir $address }}{{ end -}}
{{- end -}}

{{/* Returns the node affinity. Kubernetes combines the terms with OR, so each term contains allOf. */}}
{{- define "gpu-cost-exporter.nodeSelectorTerms" -}}
{{- $affinity := ternary dict .Values.agent.nodeAffinity (eq "true" (include "gpu-cost-exporter.isSimulated" .)) -}}
{{- $terms := list -}}
{{- range $affinity.anyOf -}}
{{- $terms = append $terms (dict "matchExpressions" (concat (list .) ($affinity.allOf | default list))) -}}
{{- end -}}
{{- if and (not $affinity.anyOf) $affinity.allOf -}}
{{- $terms = list (dict "matchExpressions" $affinity.allOf) -}}
{{- end -}}
{{- with $terms }}{{ toYaml . }}{{ end -}}
{{- end -}}
