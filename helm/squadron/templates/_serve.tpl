{{/* What cluster.app:build is told. */}}
{{- define "squadron.args" -}}
{{- $root := . -}}
{{- $args := dict "host" "0.0.0.0" "port" (int .Values.service.port) -}}
{{- range $key, $value := .Values.app -}}
{{- if not (kindIs "invalid" $value) }}{{ $_ := set $args $key $value }}{{ end -}}
{{- end -}}
{{- if .Values.apiKeys.existingSecret }}{{ $_ := set $args "api_key_file" "/etc/squadron/keys/keys.yaml" }}{{ end -}}
{{- with include "squadron.hosts" . | fromJson }}{{ with .hosts }}{{ $_ := set $args "allowed_hosts" . }}{{ end }}{{ end -}}
{{- $models := list -}}
{{- range (include "squadron.models" . | fromJson).models -}}
{{- $models = append $models (include "squadron.settings" (dict "root" $root "model" .) | fromJson) -}}
{{- end -}}
{{- $_ := set $args "models" $models -}}
{{- toYaml $args -}}
{{- end -}}

{{/* Names by which clients may call the endpoint, beside those that it takes anyway. With keys they are looked at only where
     app.allowed_hosts says so. */}}
{{- define "squadron.hosts" -}}
{{- $hosts := list -}}
{{- with .Values.app.allowed_hosts -}}
{{- if not (kindIs "string" .) }}{{ $hosts = . }}
{{- else if hasPrefix "[" . }}{{ $hosts = fromJsonArray . }}
{{- else }}{{ $hosts = splitList "," . }}
{{- end -}}
{{- end -}}
{{- if or $hosts (not .Values.apiKeys.existingSecret) -}}
{{- $hosts = append $hosts (printf "%s.%s" (include "squadron.serveService" .) .Release.Namespace) -}}
{{- if and .Values.ingress.enabled .Values.ingress.host }}{{ $hosts = append $hosts .Values.ingress.host }}{{ end -}}
{{- if .Values.gateway.enabled }}{{ $hosts = concat $hosts (default list .Values.gateway.hostnames) }}{{ end -}}
{{- end -}}
{{- toJson (dict "hosts" (uniq $hosts)) -}}
{{- end -}}

{{- define "squadron.serveConfig" -}}
proxy_location: EveryNode
http_options:
  host: 0.0.0.0
  port: {{ int .Values.service.port }}
applications:
  - name: squadron
    route_prefix: /
    import_path: cluster.app:build
    args:
      {{- include "squadron.args" . | nindent 6 }}
{{- end -}}
