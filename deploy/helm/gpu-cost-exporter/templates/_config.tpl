{{/*
Options file of the agent. The chart writes the options that its values determine. It refuses these keys in agent.config, so that a mount
and the option that names it cannot differ.
*/}}
{{- define "gpu-cost-exporter.agentConfig" -}}
{{- $agent := .Values.agent -}}
{{- $set := dict "listen" (printf ":%d" (int $agent.port)) -}}
{{- $by := dict "listen" "agent.port" "attribution" "agent.attribution.enabled" "kubelet-socket" "agent.attribution.kubeletPath" -}}
{{- $by = merge $by (dict "kube-metadata" "agent.metadata.enabled" "namespace-teams" "agent.metadata.namespaceTeams") -}}
{{- $by = merge $by (dict "node-name" "the name of the pod's node" "lock-dir" "the mount of the node's lock" "dcgm-address" "agent.dcgm.address") -}}
{{- if not $agent.attribution.enabled }}{{ $_ := set $set "attribution" false }}{{ end -}}
{{- if include "gpu-cost-exporter.asksApi" . -}}
{{- $_ := set $set "kube-metadata" true -}}
{{- if not $agent.metadata.namespaceTeams }}{{ $_ := set $set "namespace-teams" false }}{{ end -}}
{{- end -}}
{{- if include "gpu-cost-exporter.keepsState" . -}}
{{- $_ := set $set "state-dir" "/state" -}}
{{- $_ := set $by "state-dir" "agent.state" -}}
{{- end -}}
{{- with $agent.dcgm.address }}{{ $_ := set $set "dcgm-address" . }}{{ end -}}
{{- if include "gpu-cost-exporter.dcgmSocketFolder" . -}}
{{- $_ := set $set "dcgm-address" (printf "unix:///run/dcgm/%s" (base $agent.dcgm.address)) -}}
{{- end -}}
{{- if include "gpu-cost-exporter.hasFile" $agent.priceBook -}}
{{- $_ := set $set "price-book" (printf "/etc/gpu-cost-exporter/prices/%s" $agent.priceBook.key) -}}
{{- $_ := set $by "price-book" "agent.priceBook" -}}
{{- end -}}
{{- if include "gpu-cost-exporter.hasFile" $agent.collectors -}}
{{- $_ := set $set "collectors" (printf "/etc/gpu-cost-exporter/collectors/%s" $agent.collectors.key) -}}
{{- $_ := set $by "collectors" "agent.collectors" -}}
{{- end -}}
{{- with include "gpu-cost-exporter.webConfigPath" $agent.web -}}
{{- $_ := set $set "web-config" . -}}
{{- $_ := set $by "web-config" "agent.web" -}}
{{- end -}}
{{/* Default of the links on the agent's page. */}}
{{- $cost := dig "external-url" "" (.Values.service.config | default dict) -}}
{{- if and .Values.service.enabled $cost (not (hasKey ($agent.config | default dict) "cost-service-url")) -}}
{{- $_ := set $set "cost-service-url" $cost -}}
{{- end -}}
{{- include "gpu-cost-exporter.merged" (dict "given" ($agent.config | default dict) "set" $set "by" $by "path" "agent.config") -}}
{{- end -}}

{{/* Options file of the cost service, like that of the agent. */}}
{{- define "gpu-cost-exporter.serviceConfig" -}}
{{- $service := .Values.service -}}
{{- $set := dict "listen" (printf ":%d" (int $service.port)) -}}
{{- $by := dict "listen" "service.port" "store" "service.store" -}}
{{- if ne $service.store.type "none" }}{{ $_ := set $set "store" "/store/days.sqlite" }}{{ end -}}
{{- if include "gpu-cost-exporter.hasFile" $service.budgets -}}
{{- $_ := set $set "budgets" (printf "/etc/gpu-cost-exporter/budgets/%s" $service.budgets.key) -}}
{{- $_ := set $by "budgets" "service.budgets" -}}
{{- end -}}
{{- with include "gpu-cost-exporter.webConfigPath" $service.web -}}
{{- $_ := set $set "web-config" . -}}
{{- $_ := set $by "web-config" "service.web" -}}
{{- end -}}
{{- include "gpu-cost-exporter.merged" (dict "given" ($service.config | default dict) "set" $set "by" $by "path" "service.config") -}}
{{- end -}}

{{- define "gpu-cost-exporter.merged" -}}
{{- range $key, $value := .by -}}
{{- if hasKey $.given $key -}}
{{- fail (printf "%s.%s: is not allowed here; the chart sets it from %s; remove it" $.path $key $value) -}}
{{- end -}}
{{- end -}}
{{- toYaml (merge (dict) .set .given) -}}
{{- end -}}

{{/* Whether a value with content, existingConfigMap and key defines a file. */}}
{{- define "gpu-cost-exporter.hasFile" -}}
{{- if or .content .existingConfigMap }}true{{ end -}}
{{- end -}}

{{/* Returns an entry of a ConfigMap, from text or from a mapping. Parameters: (dict "key" KEY "content" CONTENT). */}}
{{- define "gpu-cost-exporter.fileEntry" -}}
{{- if kindIs "map" .content }}
{{- if kindIs "bool" .content.list_prices }}
{{- /* Helm's YAML parser converts on and off to booleans, which the price book does not accept. */}}
{{- $_ := set . "content" (merge (dict "list_prices" (ternary "on" "off" .content.list_prices)) .content) }}
{{- end }}
{{- end }}
{{- /* The explicit indentation allows text that begins with blanks. */}}
{{- .key }}: |2
  {{- if kindIs "string" .content }}
  {{- .content | trimSuffix "\n" | nindent 2 }}
  {{- else }}
  {{- toYaml .content | nindent 2 }}
  {{- end }}
{{- end -}}

{{/* Returns the source of a volume: a ConfigMap of the chart, or an existing one. Parameters: (dict "file" VALUE "name" NAME). */}}
{{- define "gpu-cost-exporter.fileVolume" -}}
{name: {{ .file.existingConfigMap | default .name | quote }}}
{{- end -}}

{{/* Returns the path of the web configuration; empty for plain HTTP. */}}
{{- define "gpu-cost-exporter.webConfigPath" -}}
{{- if .existingSecret -}}
/etc/gpu-cost-exporter/web/{{ .key }}
{{- else if .tlsSecret -}}
/etc/gpu-cost-exporter/config/web.yaml
{{- end -}}
{{- end -}}

{{/* Returns the web configuration for tlsSecret alone. */}}
{{- define "gpu-cost-exporter.webConfig" -}}
tls_server_config:
  cert_file: /etc/gpu-cost-exporter/tls/tls.crt
  key_file: /etc/gpu-cost-exporter/tls/tls.key
{{- end -}}

{{- define "gpu-cost-exporter.hasTls" -}}
{{- if or .tlsSecret .tls }}true{{ end -}}
{{- end -}}

{{/* Mounts of the web configuration. Secrets are mounted as folders, so that Kubernetes updates them while the pod runs. */}}
{{- define "gpu-cost-exporter.webMounts" -}}
{{- if .existingSecret }}
- {name: web, mountPath: /etc/gpu-cost-exporter/web, readOnly: true}
{{- end }}
{{- if .tlsSecret }}
- {name: tls, mountPath: /etc/gpu-cost-exporter/tls, readOnly: true}
{{- end }}
{{- end -}}

{{- define "gpu-cost-exporter.webVolumes" -}}
{{- with .existingSecret }}
- {name: web, secret: {secretName: {{ quote . }}}}
{{- end }}
{{- with .tlsSecret }}
- {name: tls, secret: {secretName: {{ quote . }}}}
{{- end }}
{{- end -}}

{{/*
Returns a probe. Neither path needs a password. The kubelet has no client certificate: if one is required, the probe only checks the port.
Parameters: (dict "web" VALUE "path" PATH "timing" VALUE).
*/}}
{{- define "gpu-cost-exporter.probe" -}}
{{- if .web.clientCertificate -}}
tcpSocket: {port: metrics}
{{- else -}}
httpGet: {path: {{ .path }}, port: metrics{{ if include "gpu-cost-exporter.hasTls" .web }}, scheme: HTTPS{{ end }}}
{{- end }}
{{- with .timing }}
{{ toYaml . }}
{{- end }}
{{- end -}}
