{{/* A selector of a namespace, or that of the namespace by its name. No default in values.yaml, which Helm would mix with what is given. */}}
{{- define "gpu-cost-exporter.namespaceSelector" -}}
{{- toYaml (.given | default (dict "matchLabels" (dict "kubernetes.io/metadata.name" .name))) -}}
{{- end -}}

{{/* The pods of OpenShift's DNS listen at 5353, and a policy sees the pods' ports. */}}
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
