{{- define "gpu-cost-exporter.dnsEgress" -}}
- to:
    - namespaceSelector:
        {{- toYaml .namespaceSelector | nindent 8 }}
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
