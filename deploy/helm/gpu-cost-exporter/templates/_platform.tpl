{{/*
The platform: what is given, or for auto what the cluster's APIs and version show. AKS shows neither. With `helm template` only
--api-versions and --kube-version say anything of the cluster.
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

{{/* Whether the agent simulates its node: it then needs nothing of the real one. */}}
{{- define "gpu-cost-exporter.isSimulated" -}}
{{- if hasKey (.Values.agent.config | default dict) "simulate" }}true{{ end -}}
{{- end -}}

{{/* What a value that may be auto comes to, as text. Takes (dict "given" VALUE "auto" VALUE). */}}
{{- define "gpu-cost-exporter.settled" -}}
{{- ternary .auto .given (eq (toString .given) "auto") -}}
{{- end -}}

{{/* The same of a switch; empty is off. */}}
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

{{/* Whether the devices are asked for by a mount, too. */}}
{{- define "gpu-cost-exporter.mountsDeviceList" -}}
{{- if eq "runtimeClass" (include "gpu-cost-exporter.driverMode" .) -}}
{{- $own := has (include "gpu-cost-exporter.platform" .) (list "eks" "gpu-operator") -}}
{{- include "gpu-cost-exporter.switched" (dict "given" .Values.agent.driver.runtimeClass.deviceListMount "auto" $own) -}}
{{- end -}}
{{- end -}}

{{/* GKE admits critical pods outside kube-system under a quota only, with the GPU Operator as without it. */}}
{{- define "gpu-cost-exporter.quotaPods" -}}
{{- $gke := or (eq "gke" (include "gpu-cost-exporter.platform" .)) (contains "-gke." .Capabilities.KubeVersion.Version) -}}
{{- include "gpu-cost-exporter.settled" (dict "given" .Values.agent.priorityQuotaPods "auto" (ternary 10000 0 $gke)) | int64 -}}
{{- end -}}

{{- define "gpu-cost-exporter.makesScc" -}}
{{- $own := include "gpu-cost-exporter.isOpenshift" . | eq "true" -}}
{{- include "gpu-cost-exporter.switched" (dict "given" .Values.agent.scc.create "auto" $own) -}}
{{- end -}}

{{/* Whether the agent asks the API server: of pods, whose holders it knows. A simulated node has an API server of its own. */}}
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

{{/* A node that does not exist may be on any node, and is not critical. */}}
{{- define "gpu-cost-exporter.priorityClassName" -}}
{{- if not (include "gpu-cost-exporter.isSimulated" .) }}{{ .Values.agent.priorityClassName | default "" }}{{ end -}}
{{- end -}}

{{/* Kinds of the Prometheus operator, which a cluster without it refuses. */}}
{{- define "gpu-cost-exporter.hasOperator" -}}
{{- if .Capabilities.APIVersions.Has "monitoring.coreos.com/v1" }}true{{ end -}}
{{- end -}}

{{/* PodMonitor or ServiceMonitor; empty without either. */}}
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

{{/* Security context of the cost service's pod: OpenShift refuses fixed ids. */}}
{{- define "gpu-cost-exporter.servicePodSecurity" -}}
{{- $context := deepCopy (.Values.service.podSecurityContext | default dict) -}}
{{- if include "gpu-cost-exporter.isOpenshift" . -}}
{{- range list "runAsUser" "runAsGroup" "fsGroup" -}}
{{- if eq "65534" (get $context . | toString) }}{{ $_ := unset $context . }}{{ end -}}
{{- end -}}
{{- end -}}
{{- toYaml $context -}}
{{- end -}}
