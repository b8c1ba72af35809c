{{/* What works and may not be meant, one line each, for NOTES. */}}
{{- define "gpu-cost-exporter.warnings" -}}
{{- $monitoring := .Values.monitoring -}}
{{- $monitored := include "gpu-cost-exporter.monitorKind" . -}}
{{- $operator := include "gpu-cost-exporter.hasOperator" . -}}
{{- if not (or $monitored $monitoring.scrapeAnnotations) }}
- monitoring.podMonitor.enabled: is {{ $monitoring.podMonitor.enabled }}{{ if not $operator }}, and this cluster has no Prometheus operator{{ end }}: nothing scrapes the pods.
  Set monitoring.scrapeAnnotations=true, or add a scrape job to your Prometheus (docs/install.md).
{{- end }}
{{- if and $monitored $monitoring.scrapeAnnotations }}
- monitoring.scrapeAnnotations: is true, and so is a monitor: a Prometheus that goes by both counts every GPU twice.
{{- end }}
{{- if and $monitored (not $monitoring.labels) }}
- monitoring.labels: is empty. A Prometheus that selects monitors by a label, as kube-prometheus-stack's does by release, sees none.
{{- end }}
{{- if and $monitored (ne $monitoring.scrape.job "gpu-cost-exporter") }}
- monitoring.scrape.job: is {{ $monitoring.scrape.job }}; by that name the alert GPUExporterDown does not know an agent that was never scraped.
{{- end }}
{{- if and $monitoring.scrapeAnnotations (not $monitored) }}
- monitoring.scrapeAnnotations: the job is one of your Prometheus: the alert GPUExporterDown does not know an agent that was never scraped.
{{- end }}
{{- if not (include "gpu-cost-exporter.hasRules" .) }}
- monitoring.rules.enabled: is {{ $monitoring.rules.enabled }}, and no rules are installed. Alerts, dashboards, reports and the cost service need rules/prometheus-rules.yaml in Prometheus.
{{- end }}
{{- if .Values.agent.enabled }}{{ include "gpu-cost-exporter.agentWarnings" . }}{{ end }}
{{- if .Values.service.enabled }}{{ include "gpu-cost-exporter.serviceWarnings" . }}{{ end }}
{{- end -}}

{{/* A web configuration in a Secret cannot be looked into. Takes (dict "web" VALUE "path" PATH). */}}
{{- define "gpu-cost-exporter.webWarnings" -}}
{{- if and .web.existingSecret (not (or .web.tlsSecret .web.tls)) }}
- {{ .path }}.existingSecret: is given, and {{ .path }}.tls is false: if it has TLS, probes fail and the pods are restarted for ever.
{{- end }}
{{- end -}}

{{- define "gpu-cost-exporter.agentWarnings" -}}
{{- $agent := .Values.agent -}}
{{- $config := $agent.config | default dict -}}
{{- if include "gpu-cost-exporter.isSimulated" . }}
- agent.config.simulate: is given: what is shown does not exist. Every page and series says so.
{{- end }}
{{- if not $agent.attribution.enabled }}
- agent.attribution.enabled: is false: no pod is known, and all time is nobody's.
{{- end }}
{{- if not (include "gpu-cost-exporter.asksApi" .) }}
{{- if not (or (include "gpu-cost-exporter.isSimulated" .) $agent.metadata.enabled) }}
- agent.metadata.enabled: is false: money goes to namespaces. With true it goes to workloads and teams; the agent may then read pods.
{{- end }}
{{- range list "pod-labels" "pod-annotations" "team-keys" "cost-labels" "reservation-namespaces" }}
{{- if hasKey $config . }}
- agent.config.{{ . }}: has no effect without agent.metadata.enabled=true.
{{- end }}
{{- end }}
{{- else if not .Values.rbac.create }}
- rbac.create: is false: bind list and watch of pods, get of nodes and what else docs/performance.md names to {{ include "gpu-cost-exporter.serviceAccountName" . }}.
{{- end }}
{{- if not $agent.processes.enabled }}
- agent.processes.enabled: is false: where pods share a GPU their use is divided evenly, and marked estimated.
{{- end }}
{{- if not (or $agent.state.enabled (include "gpu-cost-exporter.isSimulated" .)) }}
- agent.state.enabled: is false: the ledger's counters begin again with every restart, and what was not scraped is lost.
{{- end }}
{{- if not (or (include "gpu-cost-exporter.isRoot" .) (include "gpu-cost-exporter.isSimulated" .)) }}
- agent.state.enabled: is false, and the agent is not root: it cannot lock the node. A second agent there counts the same time again.
{{- end }}
{{- if and $agent.affinity $agent.nodeAffinity }}
- agent.affinity: replaces agent.nodeAffinity; see that nodes without a GPU are left out.
{{- end }}
{{- $mode := include "gpu-cost-exporter.driverMode" . }}
{{- if and (eq $mode "none") (not (include "gpu-cost-exporter.isSimulated" .)) }}
- agent.driver.mode: is none: without a driver in the image, or an engine at agent.dcgm.address, nothing is read.
{{- end }}
{{- if and (eq $mode "privileged") (eq .Values.agent.driver.privileged.hostPath "/") }}
- agent.driver.privileged.hostPath: is /, whose libraries hide the image's; name the driver's own folder, or libnvidia-ml.so.1.
{{- end }}
{{- $scc := include "gpu-cost-exporter.makesScc" . }}
{{- if and $scc (not (.Capabilities.APIVersions.Has "security.openshift.io/v1")) }}
- agent.scc.create: a SecurityContextConstraints is made, and this cluster is not known to be OpenShift.
{{- else if and (not $scc) (.Capabilities.APIVersions.Has "security.openshift.io/v1") }}
- agent.scc.create: no SecurityContextConstraints is made, and this is OpenShift: no pod is admitted. Set platform=openshift.
{{- end }}
{{- if and (eq $mode "dra") (semverCompare "<1.34-0" .Capabilities.KubeVersion.Version) }}
- agent.driver.mode: is dra; Kubernetes {{ .Capabilities.KubeVersion.Version }} has admin access to claims behind the feature gate DRAAdminAccess.
{{- end }}
{{- if $agent.openCost }}
{{- if or (ne (int $agent.port) 9400) (include "gpu-cost-exporter.hasTls" $agent.web) $agent.web.basicAuth }}
- agent.openCost: OpenCost asks plain HTTP at port 9400 without a password, and will not find this agent.
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
- agent.dcgm.library: is empty: the image has no libdcgm.so.4, without which no engine can be asked. Give hostPath or image.
{{- end }}
{{- if and $alone (not $dcgm.address) (not $agent.hostNetwork) }}
- agent.dcgm.address: is empty, and agent.config.source is dcgm: the engine is looked for at localhost:5555, the pod's own loopback.
{{- else if and (not $alone) (not $dcgm.address) (include "gpu-cost-exporter.hasDcgmLibrary" .) }}
- agent.dcgm.address: is empty: the library is not used.
{{- end }}
{{- if and (not $agent.hostNetwork) (regexMatch "^(tcp://)?(localhost|127[.]|\\[::1\\])" ($dcgm.address | default "")) }}
- agent.dcgm.address: {{ $dcgm.address }} is the pod's own loopback; for the node's set agent.hostNetwork=true, or use a Unix socket.
{{- end }}
{{- if eq ($dcgm.address | default "") "embedded" }}
- agent.dcgm.address: embedded needs DCGM's whole package in the image, and for profiling SYS_ADMIN; see docs/dcgm.md.
{{- end }}
{{- end -}}

{{- define "gpu-cost-exporter.serviceWarnings" -}}
{{- $service := .Values.service -}}
{{- $config := $service.config | default dict -}}
{{- if eq $service.store.type "emptyDir" }}
- service.store.type: is emptyDir: closed days are lost with the pod, and filled again as far as Prometheus goes back.
{{- else if eq $service.store.type "none" }}
- service.store.type: is none: the service shows what Prometheus still has; after 15 days that is usually nothing.
{{- end }}
{{- include "gpu-cost-exporter.webWarnings" (dict "web" $service.web "path" "service.web") }}
{{- if and .Values.image.digest (not $service.image.digest) }}
- service.image.digest: is empty while image.digest is given: the cost service's image is named by its tag.
{{- end }}
{{- if and (hasPrefix "http://" (dig "prometheus" "" $config)) (hasKey $config "prometheus-token-file") }}
- service.config.prometheus: is http://, so that everybody in between can read the token.
{{- end }}
{{- end -}}
