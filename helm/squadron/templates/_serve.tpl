{{/* What cluster.app:build is told. */}}
{{- define "squadron.args" -}}
{{- $root := . -}}
{{- $args := dict "host" "0.0.0.0" "port" (int .Values.service.port) -}}
{{- range $key, $value := .Values.app -}}
{{- if not (kindIs "invalid" $value) }}{{ $_ := set $args $key $value }}{{ end -}}
{{- end -}}
{{- if .Values.apiKeys.existingSecret }}{{ $_ := set $args "api_key_file" "/etc/squadron/keys/keys.yaml" }}{{ end -}}
{{- $models := list -}}
{{- range (include "squadron.models" . | fromJson).models -}}
{{- $models = append $models (include "squadron.settings" (dict "root" $root "model" .) | fromJson) -}}
{{- end -}}
{{- $_ := set $args "models" $models -}}
{{- toYaml $args -}}
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
