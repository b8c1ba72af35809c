{{/*
Returns the platform: the given one, or for auto the one detected from the APIs and version of the cluster. AKS has no such mark. With
`helm template`, only --api-versions and --kube-version describe the cluster.
*/}}
{{- define "gpu-cost-exporter.platform" -}}
{{- $version := .Capabilities.KubeVersion.Version -}}
{{- if ne .Values.platform "auto" -}}
{{ .Values.platform }}
{{- else if .Capabilities.APIVersions.Has "security.openshift.io/v1" -}}
openshift
{{- else if .Capabilities.APIVersions.Has "nvidia.com/v1" -}}
gpu-operator
{{- else if contains "-gke." $version -}}
gke
{{- else if contains "-eks-" $version -}}
eks
{{- else if regexMatch "[+](k3s|rke2)" $version -}}
k3s
{{- else -}}
bare
{{- end -}}
{{- end -}}

{{- define "gpu-cost-exporter.isOpenshift" -}}
{{- if eq "openshift" (include "gpu-cost-exporter.platform" .) }}true{{ end -}}
{{- end -}}

{{/* Whether the agent simulates its node: it then does not use the real node. */}}
{{- define "gpu-cost-exporter.isSimulated" -}}
{{- if hasKey (.Values.agent.config | default dict) "simulate" }}true{{ end -}}
{{- end -}}

{{/* Resolves a value that can be auto, as text. Parameters: (dict "given" VALUE "auto" VALUE). */}}
{{- define "gpu-cost-exporter.settled" -}}
{{- ternary .auto .given (eq (toString .given) "auto") -}}
{{- end -}}

{{/* Resolves a switch that can be auto; empty is off. */}}
{{- define "gpu-cost-exporter.switched" -}}
{{- if eq "true" (include "gpu-cost-exporter.settled" .) }}true{{ end -}}
{{- end -}}

{{- define "gpu-cost-exporter.driverMode" -}}
{{- $own := ternary "privileged" "runtimeClass" (eq "gke" (include "gpu-cost-exporter.platform" .)) -}}
{{- $own = ternary "none" $own (eq "true" (include "gpu-cost-exporter.isSimulated" .)) -}}
{{- include "gpu-cost-exporter.settled" (dict "given" .Values.agent.driver.mode "auto" $own) -}}
{{- end -}}

{{- define "gpu-cost-exporter.runtimeClassName" -}}
{{- $driver := .Values.agent.driver -}}
{{- $mode := include "gpu-cost-exporter.driverMode" . -}}
{{- if eq $mode "runtimeClass" -}}
{{- $own := ternary "" "nvidia" (has (include "gpu-cost-exporter.platform" .) (list "eks" "aks")) -}}
{{- include "gpu-cost-exporter.settled" (dict "given" ($driver.runtimeClass.name | default "") "auto" $own) -}}
{{- else if eq $mode "cdi" -}}
{{ $driver.cdi.runtimeClassName | default "" }}
{{- end -}}
{{- end -}}

{{/* Whether the pod also requests the devices by a mount. */}}
{{- define "gpu-cost-exporter.mountsDeviceList" -}}
{{- if eq "runtimeClass" (include "gpu-cost-exporter.driverMode" .) -}}
{{- $own := has (include "gpu-cost-exporter.platform" .) (list "eks" "gpu-operator") -}}
{{- include "gpu-cost-exporter.switched" (dict "given" .Values.agent.driver.runtimeClass.deviceListMount "auto" $own) -}}
{{- end -}}
{{- end -}}

{{/* GKE admits critical pods outside kube-system only under a quota, with and without the GPU Operator. */}}
{{- define "gpu-cost-exporter.quotaPods" -}}
{{- $gke := or (eq "gke" (include "gpu-cost-exporter.platform" .)) (contains "-gke." .Capabilities.KubeVersion.Version) -}}
{{- include "gpu-cost-exporter.settled" (dict "given" .Values.agent.priorityQuotaPods "auto" (ternary 10000 0 $gke)) | int64 -}}
{{- end -}}

{{- define "gpu-cost-exporter.makesScc" -}}
{{- $own := include "gpu-cost-exporter.isOpenshift" . | eq "true" -}}
{{- include "gpu-cost-exporter.switched" (dict "given" .Values.agent.scc.create "auto" $own) -}}
{{- end -}}

{{/* Whether the agent queries the API server: only with attribution to pods. A simulated node has its own API server. */}}
{{- define "gpu-cost-exporter.asksApi" -}}
{{- $manager := dig "workload-manager" "kubernetes" (.Values.agent.config | default dict) -}}
{{- if and .Values.agent.enabled .Values.agent.metadata.enabled .Values.agent.attribution.enabled (eq $manager "kubernetes") -}}
{{- if not (include "gpu-cost-exporter.isSimulated" .) }}true{{ end -}}
{{- end -}}
{{- end -}}

{{- define "gpu-cost-exporter.keepsState" -}}
{{- if and .Values.agent.state.enabled (not (include "gpu-cost-exporter.isSimulated" .)) }}true{{ end -}}
{{- end -}}

{{- define "gpu-cost-exporter.seesProcesses" -}}
{{- if and .Values.agent.processes.enabled (not (include "gpu-cost-exporter.isSimulated" .)) }}true{{ end -}}
{{- end -}}

{{/* A simulated node is not critical and can run on any node. */}}
{{- define "gpu-cost-exporter.priorityClassName" -}}
{{- if not (include "gpu-cost-exporter.isSimulated" .) }}{{ .Values.agent.priorityClassName | default "" }}{{ end -}}
{{- end -}}

{{/* Whether the cluster has the kinds of the Prometheus operator; a cluster without them refuses such objects. */}}
{{- define "gpu-cost-exporter.hasOperator" -}}
{{- if .Capabilities.APIVersions.Has "monitoring.coreos.com/v1" }}true{{ end -}}
{{- end -}}

{{/* Returns PodMonitor or ServiceMonitor; empty without a monitor. */}}
{{- define "gpu-cost-exporter.monitorKind" -}}
{{- $monitoring := .Values.monitoring -}}
{{- $own := and (include "gpu-cost-exporter.hasOperator" .) (not (or $monitoring.serviceMonitor.enabled $monitoring.scrapeAnnotations)) -}}
{{- if include "gpu-cost-exporter.switched" (dict "given" $monitoring.podMonitor.enabled "auto" (not (not $own))) -}}
PodMonitor
{{- else if $monitoring.serviceMonitor.enabled -}}
ServiceMonitor
{{- end -}}
{{- end -}}

{{- define "gpu-cost-exporter.hasRules" -}}
{{- $own := include "gpu-cost-exporter.hasOperator" . | eq "true" -}}
{{- include "gpu-cost-exporter.switched" (dict "given" .Values.monitoring.rules.enabled "auto" $own) -}}
{{- end -}}

{{- define "gpu-cost-exporter.hasDashboards" -}}
{{- $own := include "gpu-cost-exporter.hasOperator" . | eq "true" -}}
{{- include "gpu-cost-exporter.switched" (dict "given" .Values.monitoring.dashboards.enabled "auto" $own) -}}
{{- end -}}

{{/* Returns the security context of the cost service's pod, without fixed ids on OpenShift, which refuses them. */}}
{{- define "gpu-cost-exporter.servicePodSecurity" -}}
{{- $context := deepCopy (.Values.service.podSecurityContext | default dict) -}}
{{- if include "gpu-cost-exporter.isOpenshift" . -}}
{{- range list "runAsUser" "runAsGroup" "fsGroup" -}}
{{- if eq "65534" (get $context . | toString) }}{{ $_ := unset $context . }}{{ end -}}
{{- end -}}
{{- end -}}
{{- toYaml $context -}}
{{- end -}}
