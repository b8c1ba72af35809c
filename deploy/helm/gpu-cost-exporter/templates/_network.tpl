{{/* A selector of a namespace, or that of the namespace by its name. No default in values.yaml, which Helm would mix with what is given. */}}
{{- define "gpu-cost-exporter.namespaceSelector" -}}
{{- toYaml (.given | default (dict "matchLabels" (dict "kubernetes.io/metadata.name" .name))) -}}
{{- end -}}

{{- define "gpu-cost-exporter.dnsEgress" -}}
- to:
    - namespaceSelector:
        {{- include "gpu-cost-exporter.namespaceSelector" (dict "given" .namespaceSelector "name" "kube-system") | nindent 8 }}
  ports:
    {{- range .ports }}
    - {port: {{ . }}, protocol: UDP}
    - {port: {{ . }}, protocol: TCP}
    {{- end }}
{{- end -}}

{{/* Port of the engine, where it is reached by a network; empty where it is not. */}}
{{- define "gpu-cost-exporter.dcgmPort" -}}
{{- $address := .Values.agent.dcgm.address | default "" -}}
{{- if and $address (ne $address "embedded") (not (include "gpu-cost-exporter.dcgmSocketFolder" .)) -}}
{{- regexFind ":[0-9]+$" $address | trimPrefix ":" | default "5555" -}}
{{- end -}}
{{- end -}}

{{/* Port in the address of Prometheus. */}}
{{- define "gpu-cost-exporter.prometheusPort" -}}
{{- $url := urlParse (dig "prometheus" "http://prometheus:9090" (.Values.service.config | default dict)) -}}
{{- regexFind ":[0-9]+$" $url.host | trimPrefix ":" | default (ternary "443" "80" (eq $url.scheme "https")) -}}
{{- end -}}
