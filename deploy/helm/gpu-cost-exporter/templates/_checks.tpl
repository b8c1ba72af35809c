{{/* Checks of combinations of values that the schema cannot express; each message names the key to set. */}}
{{- define "gpu-cost-exporter.checks" -}}
{{- $agent := .Values.agent -}}
{{- $service := .Values.service -}}
{{- $monitored := include "gpu-cost-exporter.monitorKind" . -}}
{{- if not .Values.image.registry -}}
{{- fail "image.registry: is empty, so nodes cannot pull the images; set the registry, such as --set image.registry=registry.example.org (docs/install.md, Images), or docker.io/library for images that were imported into the nodes" -}}
{{- end -}}
{{- if not (or $agent.enabled $service.enabled) -}}
{{- fail "agent.enabled: is false, and service.enabled is false: nothing to install; set one of them to true" -}}
{{- end -}}
{{- if and (eq "PodMonitor" $monitored) .Values.monitoring.serviceMonitor.enabled -}}
{{- fail "monitoring.serviceMonitor.enabled: is true, and monitoring.podMonitor.enabled is true: every GPU would be counted twice; set one of them to false" -}}
{{- end -}}
{{- $scrape := .Values.monitoring.scrape -}}
{{- if gt (include "gpu-cost-exporter.seconds" $scrape.timeout | float64) (include "gpu-cost-exporter.seconds" $scrape.interval | float64) -}}
{{- fail (printf "monitoring.scrape.timeout: is %s; expected: at most monitoring.scrape.interval (%s)" $scrape.timeout $scrape.interval) -}}
{{- end -}}
{{- range $key, $address := .Values.monitoring.links -}}
{{- if and $address (not (regexMatch "^https?://[A-Za-z0-9._~:/@%+=&?,-]+$" $address)) -}}
{{- fail (printf "monitoring.links.%s: is %s; expected: an address with https:// or http://, without # and blanks" $key $address) -}}
{{- end -}}
{{- end -}}
{{- if $agent.enabled -}}
{{- include "gpu-cost-exporter.agentChecks" . -}}
{{- include "gpu-cost-exporter.webChecks" (dict "web" $agent.web "path" "agent.web" "monitored" $monitored) -}}
{{- end -}}
{{- if $service.enabled -}}
{{- include "gpu-cost-exporter.serviceChecks" . -}}
{{- include "gpu-cost-exporter.webChecks" (dict "web" $service.web "path" "service.web" "monitored" $monitored) -}}
{{- end -}}
{{- end -}}

{{- define "gpu-cost-exporter.agentChecks" -}}
{{- $agent := .Values.agent -}}
{{- include "gpu-cost-exporter.durations" (dict "root" . "part" "agent") -}}
{{- if hasSuffix ".sock" $agent.attribution.kubeletPath -}}
{{- fail (printf "agent.attribution.kubeletPath: is %s; expected: the folder of the socket, because the kubelet creates a new socket at each restart; set %s" $agent.attribution.kubeletPath (dir $agent.attribution.kubeletPath)) -}}
{{- end -}}
{{- $durations := (.Files.Get "files/durations.json" | fromJson).agent -}}
{{- $config := $agent.config | default dict -}}
{{- $expiry := get $config "attribution-expiry" | default (get $durations "attribution-expiry").default -}}
{{- $interval := get $config "kubelet-interval" | default (get $durations "kubelet-interval").default -}}
{{- if lt (include "gpu-cost-exporter.seconds" $expiry | float64) (mulf 2.0 (include "gpu-cost-exporter.seconds" $interval)) -}}
{{- fail (printf "agent.config.attribution-expiry: is %s; expected: at least twice agent.config.kubelet-interval (%s)" $expiry $interval) -}}
{{- end -}}
{{- $account := .Values.serviceAccount -}}
{{- $asks := include "gpu-cost-exporter.asksApi" . -}}
{{- $rights := or (include "gpu-cost-exporter.makesScc" .) (and $asks .Values.rbac.create) -}}
{{- if and $rights (not $account.create) (eq "default" ($account.name | default "default")) -}}
{{- fail "serviceAccount.name: is empty or default; with serviceAccount.create=false, the rights of rbac.create or agent.scc.create would apply to every pod of the namespace; set the name of another account" -}}
{{- end -}}
{{- if and (eq "dra" (include "gpu-cost-exporter.driverMode" .)) (not (and $asks $agent.metadata.dra)) -}}
{{- fail "agent.driver.mode: is dra; expected with it: agent.metadata.enabled=true and agent.metadata.dra=true, because otherwise the agent's own claim makes it the holder of every GPU" -}}
{{- end -}}
{{- if and .Values.networkPolicy.enabled $asks (not .Values.networkPolicy.apiServer.cidrs) -}}
{{- fail "networkPolicy.apiServer.cidrs: is empty, and agent.metadata needs the API server; set the addresses of the API server, such as 10.0.0.1/32 (kubectl get endpoints kubernetes)" -}}
{{- end -}}
{{- if and .Values.networkPolicy.enabled (include "gpu-cost-exporter.dcgmPort" .) (not .Values.networkPolicy.dcgm) -}}
{{- fail "networkPolicy.dcgm: is empty, and agent.dcgm.address is on the network; set the peers of the engine, such as [{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: gpu-operator}}, podSelector: {matchLabels: {app: nvidia-dcgm}}}]" -}}
{{- end -}}
{{- $update := $agent.updateStrategy.rollingUpdate -}}
{{- $surges := not (has (toString $update.maxSurge) (list "0" "0%")) -}}
{{- if eq $surges (not (has (toString $update.maxUnavailable) (list "0" "0%"))) -}}
{{- fail "agent.updateStrategy.rollingUpdate: expected: one of maxUnavailable and maxSurge is 0 and the other more than 0; Kubernetes refuses other combinations" -}}
{{- end -}}
{{- if and $surges $agent.hostNetwork -}}
{{- fail "agent.updateStrategy.rollingUpdate.maxSurge: is more than 0, and with agent.hostNetwork=true two agents of a node cannot share the port; set it to 0" -}}
{{- end -}}
{{- if and $agent.dcgm.library.hostPath $agent.dcgm.library.image -}}
{{- fail "agent.dcgm.library.image: is set, and agent.dcgm.library.hostPath is set; set only one of them" -}}
{{- end -}}
{{- if and $agent.priceBook.content $agent.priceBook.existingConfigMap -}}
{{- fail "agent.priceBook.existingConfigMap: is set, and agent.priceBook.content is set; set only one of them" -}}
{{- end -}}
{{- if and $agent.collectors.content $agent.collectors.existingConfigMap -}}
{{- fail "agent.collectors.existingConfigMap: is set, and agent.collectors.content is set; set only one of them" -}}
{{- end -}}
{{- end -}}

{{- define "gpu-cost-exporter.serviceChecks" -}}
{{- $service := .Values.service -}}
{{- include "gpu-cost-exporter.durations" (dict "root" . "part" "service") -}}
{{- $elsewhere := contains "prometheus" (lower (toJson (concat ($service.extraArgs | default list) ($service.extraEnv | default list)))) -}}
{{- if not (or (dig "prometheus" "" ($service.config | default dict)) $elsewhere) -}}
{{- fail "service.config.prometheus: is empty; expected with service.enabled: the address of Prometheus, such as http://prometheus-operated.monitoring:9090" -}}
{{- end -}}
{{- if regexMatch "^[a-z]+://[^/]*@" (dig "prometheus" "" ($service.config | default dict)) -}}
{{- fail "service.config.prometheus: contains a user or password, which is readable in the ConfigMap; set prometheus-username and prometheus-password-file, with service.prometheusSecret" -}}
{{- end -}}
{{- range $service.extraArgs -}}
{{- if regexMatch "^--prometheus=[a-z]+://[^/]*@" . -}}
{{- fail "service.extraArgs: contains a user or password in the address of Prometheus, which is readable in the pod; set service.config.prometheus-username and prometheus-password-file, with service.prometheusSecret" -}}
{{- end -}}
{{- end -}}
{{- if regexMatch "(?i)[\"\\s,](authorization|cookie)\\s*=" (toJson (dig "prometheus-headers" "" ($service.config | default dict))) -}}
{{- fail "service.config.prometheus-headers: contains a secret, which is readable in the ConfigMap; set prometheus-token-file, or prometheus-username and prometheus-password-file, with service.prometheusSecret" -}}
{{- end -}}
{{- if and $service.budgets.content $service.budgets.existingConfigMap -}}
{{- fail "service.budgets.existingConfigMap: is set, and service.budgets.content is set; set only one of them" -}}
{{- end -}}
{{- end -}}

{{/* With TLS or a password, the monitors need credentials: without them the scrape fails. */}}
{{- define "gpu-cost-exporter.webChecks" -}}
{{- $web := .web -}}
{{- if and (not $web.existingSecret) (or $web.basicAuth $web.clientCertificate (and $web.tls (not $web.tlsSecret))) -}}
{{- fail (printf "%s.existingSecret: is empty; required with %s.tls, .basicAuth or .clientCertificate, because these describe its web configuration" .path .path) -}}
{{- end -}}
{{- $tls := include "gpu-cost-exporter.hasTls" $web -}}
{{- if and .monitored $tls (not $web.scrape.tlsConfig) -}}
{{- fail (printf "%s.scrape.tlsConfig: is empty; required with TLS, because otherwise the monitors cannot scrape, such as {ca: {secret: {name: ..., key: ca.crt}}, serverName: ...}" .path) -}}
{{- end -}}
{{- $shown := $web.scrape.tlsConfig | default dict -}}
{{- if and .monitored $web.clientCertificate (not (and (hasKey $shown "cert") (hasKey $shown "keySecret"))) -}}
{{- fail (printf "%s.scrape.tlsConfig: has no cert or keySecret; required with %s.clientCertificate=true, because otherwise the monitors cannot scrape" .path .path) -}}
{{- end -}}
{{- if and .monitored $web.basicAuth (not $web.scrape.basicAuth) -}}
{{- fail (printf "%s.scrape.basicAuth: is empty; required with a password, because otherwise the monitors cannot scrape, such as {username: {name: ..., key: username}, password: {name: ..., key: password}}" .path) -}}
{{- end -}}
{{- end -}}

{{/* Checks that durations are in range, which a pattern cannot express; the program defines the bounds. Parameters: (dict "root" $ "part" "agent"). */}}
{{- define "gpu-cost-exporter.durations" -}}
{{- $config := (get .root.Values .part).config | default dict -}}
{{- range $key, $bounds := get (.root.Files.Get "files/durations.json" | fromJson) .part -}}
{{- with get $config $key -}}
{{- $given := include "gpu-cost-exporter.seconds" . | float64 -}}
{{- if or (lt $given $bounds.least) (gt $given $bounds.most) -}}
{{- fail (printf "%s.config.%s: %s is out of range; expected: %s" $.part $key . $bounds.allowed) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Returns a duration such as 500ms or 1m30s in seconds. */}}
{{- define "gpu-cost-exporter.seconds" -}}
{{- $per := dict "ms" 0.001 "s" 1.0 "m" 60.0 "h" 3600.0 -}}
{{- $sum := 0.0 -}}
{{- range regexFindAll "[0-9.]+(ms|s|m|h)" . -1 -}}
{{- $sum = addf $sum (mulf (regexFind "^[0-9.]+" .) (get $per (regexFind "[a-z]+$" .))) -}}
{{- end -}}
{{- $sum -}}
{{- end -}}
