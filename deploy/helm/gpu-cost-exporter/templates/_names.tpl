{{/* Returns the name of the objects, by default <release>-gpu-cost-exporter. A truncated name has a hash, so that it stays unique. */}}
{{- define "gpu-cost-exporter.fullname" -}}
{{- $name := .Values.nameOverride | default .Chart.Name -}}
{{- $full := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- $full = .Values.fullnameOverride | default $full | replace "." "-" -}}
{{- if gt (len $full) 48 -}}
{{- $full = printf "%s-%s" (trunc 39 $full | trimSuffix "-") (sha256sum $full | trunc 8) -}}
{{- end -}}
{{- $full -}}
{{- end -}}

{{- define "gpu-cost-exporter.serviceName" -}}
{{ include "gpu-cost-exporter.fullname" . }}-service
{{- end -}}

{{/* Returns the name of cluster-scoped objects, with the namespace of the release: a namespace contains no dot, so the name is unique. */}}
{{- define "gpu-cost-exporter.clusterName" -}}
{{ .Release.Namespace }}.{{ include "gpu-cost-exporter.fullname" . }}
{{- end -}}

{{- define "gpu-cost-exporter.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{ .Values.serviceAccount.name | default (include "gpu-cost-exporter.fullname" .) }}
{{- else -}}
{{ .Values.serviceAccount.name | default "default" }}
{{- end -}}
{{- end -}}

{{/* Returns the labels that select the pods of a component. They are immutable in a release. Parameters: (dict "root" $ "component" "agent"). */}}
{{- define "gpu-cost-exporter.selectorLabels" -}}
app.kubernetes.io/name: {{ .root.Values.nameOverride | default .root.Chart.Name | trunc 63 | trimSuffix "-" | quote }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{/* Returns the metadata of an object. Parameters: (dict "root" $ "component" "agent" "name" NAME), optional: labels, annotations. */}}
{{- define "gpu-cost-exporter.metadata" -}}
{{- $labels := fromYaml (include "gpu-cost-exporter.selectorLabels" .) -}}
{{- $_ := set $labels "app.kubernetes.io/version" .root.Chart.AppVersion -}}
{{- $_ := set $labels "app.kubernetes.io/managed-by" .root.Release.Service -}}
{{- $_ := set $labels "app.kubernetes.io/part-of" "gpu-cost" -}}
{{- $_ := set $labels "helm.sh/chart" (printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_") -}}
{{- $annotations := mergeOverwrite (dict) (.root.Values.commonAnnotations | default dict) (.annotations | default dict) -}}
name: {{ quote .name }}
{{- if not .cluster }}
namespace: {{ .namespace | default .root.Release.Namespace | quote }}
{{- end }}
labels:
  {{- toYaml (mergeOverwrite (dict) (.root.Values.commonLabels | default dict) (.labels | default dict) $labels) | nindent 2 }}
{{- with $annotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Returns labels and annotations of a pod. Parameters: (dict "root" $ "component" "agent" "labels" ... "annotations" ...). */}}
{{- define "gpu-cost-exporter.podMetadata" -}}
labels:
  {{- $selector := fromYaml (include "gpu-cost-exporter.selectorLabels" .) }}
  {{- toYaml (mergeOverwrite (dict) (.root.Values.commonLabels | default dict) (.labels | default dict) $selector) | nindent 2 }}
{{- with .annotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Returns the reference of an image. Parameters: (dict "registry" "" "repository" "" "tag" "" "digest" ""). */}}
{{- define "gpu-cost-exporter.image" -}}
{{- with .registry }}{{ trimSuffix "/" . }}/{{ end }}{{ .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ .tag }}{{ end }}
{{- end -}}

{{- define "gpu-cost-exporter.agentImage" -}}
{{- $tag := .Values.image.tag | default .Chart.AppVersion -}}
{{- include "gpu-cost-exporter.image" (mergeOverwrite (dict) .Values.image (dict "tag" $tag)) | quote -}}
{{- end -}}

{{- define "gpu-cost-exporter.serviceImage" -}}
{{- $own := .Values.service.image -}}
{{- $tag := $own.tag | default .Values.image.tag | default .Chart.AppVersion -}}
{{- $repository := $own.repository | default (printf "%s-service" .Values.image.repository) -}}
{{- include "gpu-cost-exporter.image" (dict "registry" .Values.image.registry "repository" $repository "tag" $tag "digest" $own.digest) | quote -}}
{{- end -}}

{{/* Returns the address of the cost service for users: external-url, or localhost as with kubectl port-forward. */}}
{{- define "gpu-cost-exporter.costPage" -}}
{{- get (.Values.service.config | default dict) "external-url" | default "http://localhost:9401" | trimSuffix "/" -}}
{{- end -}}

{{- define "gpu-cost-exporter.runbook" -}}
{{- .Values.monitoring.links.runbook | default (printf "%s/runbook" (include "gpu-cost-exporter.costPage" .)) | trimSuffix "/" -}}
{{- end -}}
