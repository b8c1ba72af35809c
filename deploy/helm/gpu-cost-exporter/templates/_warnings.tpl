{{/* Warnings for NOTES: valid values that are probably unintended, one line each. */}}
{{- define "gpu-cost-exporter.warnings" -}}
{{- $monitoring := .Values.monitoring -}}
{{- $monitored := include "gpu-cost-exporter.monitorKind" . -}}
{{- $operator := include "gpu-cost-exporter.hasOperator" . -}}
{{- if not (or $monitored $monitoring.scrapeAnnotations) }}
- monitoring.podMonitor.enabled: is {{ $monitoring.podMonitor.enabled }}{{ if not $operator }}, and this cluster has no Prometheus operator{{ end }}: Prometheus does not scrape the pods.
  Set monitoring.scrapeAnnotations=true, or add a scrape job to your Prometheus (docs/install.md).
{{- end }}
{{- if and $monitored $monitoring.scrapeAnnotations }}
- monitoring.scrapeAnnotations: is true, and a monitor is enabled: a Prometheus that uses both counts every GPU twice. Disable one of them.
{{- end }}
{{- if and $monitored (not $monitoring.labels) }}
- monitoring.labels: is empty. A Prometheus that selects monitors by a label, such as that of kube-prometheus-stack, finds none.
{{- end }}
{{- if and $monitored (ne $monitoring.scrape.job "gpu-cost-exporter") }}
- monitoring.scrape.job: is {{ $monitoring.scrape.job }}; with this name the alert GPUExporterDown misses agents that were never scraped.
{{- end }}
{{- if and $monitoring.scrapeAnnotations (not $monitored) }}
- monitoring.scrapeAnnotations: your Prometheus sets the job name, so the alert GPUExporterDown misses agents that were never scraped.
{{- end }}
{{- if not (include "gpu-cost-exporter.hasRules" .) }}
- monitoring.rules.enabled: is {{ $monitoring.rules.enabled }}, and no rules are installed. Alerts, dashboards, reports and the cost service need rules/prometheus-rules.yaml in Prometheus.
{{- end }}
{{- if .Values.agent.enabled }}{{ include "gpu-cost-exporter.agentWarnings" . }}{{ end }}
{{- if .Values.service.enabled }}{{ include "gpu-cost-exporter.serviceWarnings" . }}{{ end }}
{{- end -}}

{{/* The chart cannot read a web configuration in a Secret. Parameters: (dict "web" VALUE "path" PATH). */}}
{{- define "gpu-cost-exporter.webWarnings" -}}
{{- if and .web.existingSecret (not (or .web.tlsSecret .web.tls)) }}
- {{ .path }}.existingSecret: is set, and {{ .path }}.tls is false. If the Secret enables TLS, probes fail and the pods restart repeatedly: set {{ .path }}.tls=true.
{{- end }}
{{- end -}}

{{- define "gpu-cost-exporter.agentWarnings" -}}
{{- $agent := .Values.agent -}}
{{- $config := $agent.config | default dict -}}
{{- if include "gpu-cost-exporter.isSimulated" . }}
- agent.config.simulate: is set: all data are simulated. Every page and series is marked as simulated.
{{- end }}
{{- if not $agent.attribution.enabled }}
- agent.attribution.enabled: is false: the holders of GPUs are unknown, and no time is attributed to a pod.
{{- end }}
{{- if not (include "gpu-cost-exporter.asksApi" .) }}
{{- if not (or (include "gpu-cost-exporter.isSimulated" .) $agent.metadata.enabled) }}
- agent.metadata.enabled: is false: costs are attributed to namespaces only. With true, to workloads and teams; the agent then has the right to read pods.
{{- end }}
{{- range list "pod-labels" "pod-annotations" "team-keys" "cost-labels" "reservation-namespaces" }}
{{- if hasKey $config . }}
- agent.config.{{ . }}: has no effect without agent.metadata.enabled=true.
{{- end }}
{{- end }}
{{- else if not .Values.rbac.create }}
- rbac.create: is false: bind the rights in docs/performance.md (list and watch pods, get nodes and more) to {{ include "gpu-cost-exporter.serviceAccountName" . }}.
{{- end }}
{{- if not $agent.processes.enabled }}
- agent.processes.enabled: is false: the activity of a shared GPU is split evenly among its pods, and marked as estimated.
{{- end }}
{{- if not (or $agent.state.enabled (include "gpu-cost-exporter.isSimulated" .)) }}
- agent.state.enabled: is false: counters of the ledger reset at each restart, and unscraped increases are lost.
{{- end }}
{{- if not (or (include "gpu-cost-exporter.isRoot" .) (include "gpu-cost-exporter.isSimulated" .)) }}
- agent.state.enabled: is false, and the agent does not run as root: it cannot lock the node. A second agent on the node counts the same time again.
{{- end }}
{{- if and $agent.affinity $agent.nodeAffinity }}
- agent.affinity: replaces agent.nodeAffinity. Check that it excludes nodes without a GPU.
{{- end }}
{{- $mode := include "gpu-cost-exporter.driverMode" . }}
{{- if and (eq $mode "none") (not (include "gpu-cost-exporter.isSimulated" .)) }}
- agent.driver.mode: is "none": the agent reads nothing, unless the image contains a driver or agent.dcgm.address names an engine.
{{- end }}
{{- if and (eq $mode "privileged") (eq .Values.agent.driver.privileged.hostPath "/") }}
- agent.driver.privileged.hostPath: is /: libraries of the node hide those of the image. Set the folder of the driver, or the file libnvidia-ml.so.1.
{{- end }}
{{- $scc := include "gpu-cost-exporter.makesScc" . }}
{{- if and $scc (not (.Capabilities.APIVersions.Has "security.openshift.io/v1")) }}
- agent.scc.create: the chart creates a SecurityContextConstraints, but the cluster does not have the API of OpenShift.
{{- else if and (not $scc) (.Capabilities.APIVersions.Has "security.openshift.io/v1") }}
- agent.scc.create: no SecurityContextConstraints is created, and the cluster is OpenShift, which refuses the pods. Set platform=openshift.
{{- end }}
{{- if and (eq $mode "dra") (semverCompare "<1.34-0" .Capabilities.KubeVersion.Version) }}
- agent.driver.mode: is dra; in Kubernetes {{ .Capabilities.KubeVersion.Version }} admin access to claims needs the feature gate DRAAdminAccess.
{{- end }}
{{- if $agent.openCost }}
{{- if or (ne (int $agent.port) 9400) (include "gpu-cost-exporter.hasTls" $agent.web) $agent.web.basicAuth }}
- agent.openCost: OpenCost scrapes plain HTTP on port 9400 without a password, and cannot read this agent.
{{- end }}
{{- end }}
{{- if and .Values.networkPolicy.enabled $agent.hostNetwork }}
- networkPolicy.enabled: has no effect on pods with agent.hostNetwork.
{{- end }}
{{- include "gpu-cost-exporter.dcgmWarnings" . }}
{{- include "gpu-cost-exporter.webWarnings" (dict "web" $agent.web "path" "agent.web") }}
{{- end -}}

{{- define "gpu-cost-exporter.dcgmWarnings" -}}
{{- $agent := .Values.agent -}}
{{- $dcgm := $agent.dcgm -}}
{{- $alone := eq "dcgm" (dig "source" "auto" ($agent.config | default dict)) -}}
{{- if and (or $dcgm.address $alone) (not (include "gpu-cost-exporter.hasDcgmLibrary" .)) }}
- agent.dcgm.library: is empty: the image has no libdcgm.so.4, which the connection to an engine needs. Set hostPath or image.
{{- end }}
{{- if and $alone (not $dcgm.address) (not $agent.hostNetwork) }}
- agent.dcgm.address: is empty, and agent.config.source is dcgm: the agent connects to localhost:5555, the loopback of the pod.
{{- else if and (not $alone) (not $dcgm.address) (include "gpu-cost-exporter.hasDcgmLibrary" .) }}
- agent.dcgm.address: is empty: the library is not used.
{{- end }}
{{- if and (not $agent.hostNetwork) (regexMatch "^(tcp://)?(localhost|127[.]|\\[::1\\])" ($dcgm.address | default "")) }}
- agent.dcgm.address: {{ $dcgm.address }} is the loopback of the pod. For that of the node set agent.hostNetwork=true, or use a Unix socket.
{{- end }}
{{- if eq ($dcgm.address | default "") "embedded" }}
- agent.dcgm.address: embedded needs the complete DCGM package in the image, and SYS_ADMIN for profiling; see docs/dcgm.md.
{{- end }}
{{- end -}}

{{- define "gpu-cost-exporter.serviceWarnings" -}}
{{- $service := .Values.service -}}
{{- $config := $service.config | default dict -}}
{{- if eq $service.store.type "emptyDir" }}
- service.store.type: is emptyDir: closed days are lost with the pod, and restored only within the retention of Prometheus.
{{- else if eq $service.store.type "none" }}
- service.store.type: is "none": the service shows only the retention of Prometheus, by default 15 days.
{{- end }}
{{- include "gpu-cost-exporter.webWarnings" (dict "web" $service.web "path" "service.web") }}
{{- if and .Values.image.digest (not $service.image.digest) }}
- service.image.digest: is empty, and image.digest is set: the image of the cost service is selected by its tag.
{{- end }}
{{- if and (hasPrefix "http://" (dig "prometheus" "" $config)) (hasKey $config "prometheus-token-file") }}
- service.config.prometheus: is http://: the token is sent unencrypted. Use https://.
{{- end }}
{{- end -}}
