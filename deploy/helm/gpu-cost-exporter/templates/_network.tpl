{{/* Returns the given selector of a namespace, or one by name. values.yaml has no default, because Helm would merge it with the given one. */}}
{{- define "gpu-cost-exporter.namespaceSelector" -}}
{{- toYaml (.given | default (dict "matchLabels" (dict "kubernetes.io/metadata.name" .name))) -}}
{{- end -}}

{{/* The DNS pods of OpenShift listen on port 5353, and a policy applies to ports of pods. */}}
{{- define "gpu-cost-exporter.dnsEgress" -}}
{{- $dns := .Values.networkPolicy.dns -}}
{{- $openshift := eq "true" (include "gpu-cost-exporter.isOpenshift" .) -}}
{{- $name := ternary "openshift-dns" "kube-system" $openshift -}}
- to:
    - namespaceSelector:
        {{- include "gpu-cost-exporter.namespaceSelector" (dict "given" $dns.namespaceSelector "name" $name) | nindent 8 }}
  ports:
    {{- range $dns.ports }}
    {{- $port := ternary 5353 . (and $openshift (eq (int .) 53)) }}
    - {port: {{ $port }}, protocol: UDP}
    - {port: {{ $port }}, protocol: TCP}
    {{- end }}
{{- end -}}

{{/* Returns the port of the engine; empty if the agent does not reach it by network. */}}
{{- define "gpu-cost-exporter.dcgmPort" -}}
{{- $address := .Values.agent.dcgm.address | default "" -}}
{{- if and $address (ne $address "embedded") (not (include "gpu-cost-exporter.dcgmSocketFolder" .)) -}}
{{- regexFind ":[0-9]+$" $address | trimPrefix ":" | default "5555" -}}
{{- end -}}
{{- end -}}

{{/* Returns the port in the address of Prometheus. */}}
{{- define "gpu-cost-exporter.prometheusPort" -}}
{{- $url := urlParse (dig "prometheus" "http://prometheus:9090" (.Values.service.config | default dict)) -}}
{{- regexFind ":[0-9]+$" $url.host | trimPrefix ":" | default (ternary "443" "80" (eq $url.scheme "https")) -}}
{{- end -}}
