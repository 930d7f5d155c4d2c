{{/* What cluster.app:build is told: not how many replicas and routers there are, which the deployments of Serve's config say.
     With other arguments Serve starts all copies anew, with another number it starts or stops what it must. */}}
{{- define "squadron.args" -}}
{{- $root := . -}}
{{- $args := dict "host" "0.0.0.0" "port" (int .Values.service.port) -}}
{{- range $key, $value := .Values.app -}}
{{- if not (or (kindIs "invalid" $value) (eq $key "routers")) }}{{ $_ := set $args $key $value }}{{ end -}}
{{- end -}}
{{- if .Values.apiKeys.existingSecret }}{{ $_ := set $args "api_key_file" "/etc/squadron/keys/keys.yaml" }}{{ end -}}
{{- with include "squadron.hosts" . | fromJson }}{{ with .hosts }}{{ $_ := set $args "allowed_hosts" . }}{{ end }}{{ end -}}
{{- $models := list -}}
{{- range (include "squadron.models" . | fromJson).models -}}
{{- $settings := omit (include "squadron.settings" (dict "root" $root "model" .) | fromJson) "replicas" -}}
{{- if $settings.max_replicas -}}
{{- /* That replicas come and go, and whether all may go, is what the app must know. */}}
{{- $_ := set $settings "max_replicas" 1 -}}
{{- if $settings.min_replicas }}{{ $settings = omit $settings "min_replicas" }}{{ end -}}
{{- end -}}
{{- $models = append $models $settings -}}
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

{{/* A resource of the pods for routers alone, by which Ray places routers there. */}}
{{- define "squadron.routerResource" -}}router{{- end -}}

{{/* The deployment of a model, as cluster.resources.deployment_names calls it. */}}
{{- define "squadron.deploymentName" -}}
{{- $id := (include "squadron.names" . | fromJson).names | first -}}
{{- $plain := regexReplaceAll "[^A-Za-z0-9._-]" $id "-" -}}
Replica-{{ $plain }}{{ if ne $plain $id }}-{{ sha256sum $id | trunc 8 }}{{ end }}
{{- end -}}

{{/* What Serve's config says in place of the app's code, as JSON: {"deployments": [...]}. */}}
{{- define "squadron.deployments" -}}
{{- $known := .Files.Get "defaults/app.yaml" | fromYaml -}}
{{- $router := dict "name" "Router" "num_replicas" (int (default 1 .Values.app.routers)) -}}
{{- $batches := dict "name" "Batches" -}}
{{- if .Values.routers.workerGroup -}}
{{- $there := dict (include "squadron.routerResource" .) 0.001 -}}
{{- $_ := set $router "ray_actor_options" (dict "num_cpus" $known.router_cpus "resources" $there) -}}
{{- $_ := set $batches "ray_actor_options" (dict "num_cpus" $known.batches_cpus "resources" $there) -}}
{{- end -}}
{{- $deployments := list $router -}}
{{- if and .Values.app.batch_dir $batches.ray_actor_options }}{{ $deployments = append $deployments $batches }}{{ end -}}
{{- range (include "squadron.models" . | fromJson).models -}}
{{- $deployment := dict "name" (include "squadron.deploymentName" .model) -}}
{{- if .model.max_replicas -}}
{{- $_ := set $deployment "autoscaling_config" (include "squadron.autoscaling" (dict "model" .model "known" $known.autoscaling) | fromJson) -}}
{{- else -}}
{{- $_ := set $deployment "num_replicas" (include "squadron.replicas" .model | int) -}}
{{- end -}}
{{- $deployments = append $deployments $deployment -}}
{{- end -}}
{{- dict "deployments" $deployments | toJson -}}
{{- end -}}

{{/* As cluster.lifecycle.serve_autoscaling, which Serve takes whole or not at all. model; known: of defaults/app.yaml. */}}
{{- define "squadron.autoscaling" -}}
{{- $scaling := deepCopy .known -}}
{{- $least := include "squadron.leastReplicas" .model | int -}}
{{- $replicas := include "squadron.replicas" .model | int -}}
{{- $_ := set $scaling "min_replicas" $least -}}
{{- $_ := set $scaling "max_replicas" (int .model.max_replicas) -}}
{{- if gt $replicas (max 1 $least) }}{{ $_ := set $scaling "initial_replicas" $replicas }}{{ end -}}
{{- $times := $scaling.policy.policy_kwargs -}}
{{- range $name := list "target_ttft" "upscale_delay_s" "downscale_delay_s" -}}
{{- if not (kindIs "invalid" (index $.model $name)) }}{{ $_ := set $times $name (index $.model $name) }}{{ end -}}
{{- end -}}
{{- $_ := set $times "downscale_to_zero_delay_s" $times.downscale_delay_s -}}
{{- if not (kindIs "invalid" .model.downscale_to_zero_delay_s) }}{{ $_ := set $times "downscale_to_zero_delay_s" .model.downscale_to_zero_delay_s }}{{ end -}}
{{- toJson $scaling -}}
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
    deployments:
      {{- (include "squadron.deployments" . | fromJson).deployments | toYaml | nindent 6 }}
{{- end -}}
