{{/* Files that the agent reads only at the start: a change rolls the pods. Files that the agent reloads are not included. */}}
{{- define "gpu-cost-exporter.agentFiles" -}}
agent.yaml: |
  {{- include "gpu-cost-exporter.agentConfig" . | nindent 2 }}
{{- with .Values.agent.priceBook.content }}
{{ include "gpu-cost-exporter.fileEntry" (dict "key" $.Values.agent.priceBook.key "content" .) }}
{{- end }}
{{- with .Values.agent.collectors.content }}
{{ include "gpu-cost-exporter.fileEntry" (dict "key" $.Values.agent.collectors.key "content" .) }}
{{- end }}
{{- end -}}

{{/* Each ConfigMap and Secret is mounted as a folder, because Kubernetes does not update a file mounted with subPath. */}}
{{- define "gpu-cost-exporter.agentMounts" -}}
{{- $agent := .Values.agent -}}
- {name: config, mountPath: /etc/gpu-cost-exporter/config, readOnly: true}
{{- if include "gpu-cost-exporter.hasFile" $agent.priceBook }}
- {name: prices, mountPath: /etc/gpu-cost-exporter/prices, readOnly: true}
{{- end }}
{{- if include "gpu-cost-exporter.hasFile" $agent.collectors }}
- {name: collectors, mountPath: /etc/gpu-cost-exporter/collectors, readOnly: true}
{{- end }}
{{- include "gpu-cost-exporter.webMounts" $agent.web }}
{{- if include "gpu-cost-exporter.asksKubelet" . }}
- {name: pod-resources, mountPath: /var/lib/kubelet/pod-resources, readOnly: true}
{{- if $agent.attribution.podLogsPath }}
- {name: pod-logs, mountPath: /var/log/pods, readOnly: true}
{{- end }}
{{- end }}
{{- include "gpu-cost-exporter.driverMounts" . }}
{{- if include "gpu-cost-exporter.hasDcgmLibrary" . }}
- {name: dcgm-library, mountPath: /usr/local/dcgm, readOnly: true}
{{- end }}
{{- if include "gpu-cost-exporter.dcgmSocketFolder" . }}
# A separate path, because the folder of the node can be /tmp or /run, which the pod also has.
- {name: dcgm-socket, mountPath: /run/dcgm, readOnly: true}
{{- end }}
{{- if include "gpu-cost-exporter.keepsState" . }}
- {name: state, mountPath: /state}
{{- end }}
{{- if include "gpu-cost-exporter.locksNode" . }}
- {name: lock, mountPath: /run/gpu-cost-exporter}
{{- end }}
- {name: tmp, mountPath: /tmp}
{{- with $agent.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "gpu-cost-exporter.agentVolumes" -}}
{{- $agent := .Values.agent -}}
{{- $name := include "gpu-cost-exporter.fullname" . -}}
- {name: config, configMap: {name: {{ $name }}}}
{{- if include "gpu-cost-exporter.hasFile" $agent.priceBook }}
- {name: prices, configMap: {{ include "gpu-cost-exporter.fileVolume" (dict "file" $agent.priceBook "name" (printf "%s-prices" $name)) }}}
{{- end }}
{{- if include "gpu-cost-exporter.hasFile" $agent.collectors }}
- {name: collectors, configMap: {{ include "gpu-cost-exporter.fileVolume" (dict "file" $agent.collectors "name" (printf "%s-collectors" $name)) }}}
{{- end }}
{{- include "gpu-cost-exporter.webVolumes" $agent.web }}
{{- if include "gpu-cost-exporter.asksKubelet" . }}
# The folder, not the socket: the kubelet creates a new socket at each restart.
- {name: pod-resources, hostPath: {path: {{ quote $agent.attribution.kubeletPath }}, type: Directory}}
{{- with $agent.attribution.podLogsPath }}
# The names of its folders map pod names to uids without the API server; no log is read.
- {name: pod-logs, hostPath: {path: {{ quote . }}, type: Directory}}
{{- end }}
{{- end }}
{{- include "gpu-cost-exporter.driverVolumes" . }}
{{- if $agent.dcgm.library.hostPath }}
- {name: dcgm-library, hostPath: {path: {{ quote $agent.dcgm.library.hostPath }}, type: Directory}}
{{- else if $agent.dcgm.library.image }}
- {name: dcgm-library, emptyDir: {sizeLimit: 64Mi}}
{{- end }}
{{- with include "gpu-cost-exporter.dcgmSocketFolder" . }}
- {name: dcgm-socket, hostPath: {path: {{ quote . }}, type: Directory}}
{{- end }}
{{- if include "gpu-cost-exporter.keepsState" . }}
- {name: state, hostPath: {path: {{ include "gpu-cost-exporter.statePath" . | quote }}, type: DirectoryOrCreate}}
{{- end }}
{{- if include "gpu-cost-exporter.locksNode" . }}
# All agents of the node share this folder, in any release: only one of them writes the ledger.
- {name: lock, hostPath: {path: /run/gpu-cost-exporter, type: DirectoryOrCreate}}
{{- end }}
- {name: tmp, emptyDir: {sizeLimit: 16Mi}}
{{- with $agent.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "gpu-cost-exporter.statePath" -}}
{{ .Values.agent.state.hostPath | default (printf "/var/lib/gpu-cost-exporter/%s" (include "gpu-cost-exporter.clusterName" .)) }}
{{- end -}}
