{{/* What KubeRay's Service for clients has beyond its ports and its selector, which KubeRay keeps. */}}
{{- define "squadron.service" -}}
{{- with .annotations -}}
metadata:
  annotations:
    {{- toYaml . | nindent 4 }}
{{ end -}}
spec:
  type: {{ .type }}
  {{- if ne .type "ClusterIP" }}
  externalTrafficPolicy: {{ .externalTrafficPolicy }}
  {{- end }}
  {{- with .loadBalancerClass }}
  loadBalancerClass: {{ quote . }}
  {{- end }}
  {{- with .loadBalancerSourceRanges }}
  loadBalancerSourceRanges:
    {{- range . }}
    - {{ quote . }}
    {{- end }}
  {{- end }}
{{- end -}}

{{/* Refuses a Service that clients would not get through to. */}}
{{- define "squadron.checkService" -}}
{{- $service := .Values.service -}}
{{- $port := int $service.port -}}
{{- if or (has $port (list 6379 8080 8265 52365)) (and (gt $port 10000) (lt $port 20000)) -}}
{{- fail (printf "service.port: Ray listens on %d in the pods; give another, such as 8000" $port) -}}
{{- end -}}
{{- if ne $service.type "LoadBalancer" -}}
{{- range $name := list "loadBalancerClass" "loadBalancerSourceRanges" -}}
{{- if get $service $name }}{{ fail (printf "service.%s: a Service of type %s has no load balancer; set service.type=LoadBalancer, or leave it out" $name $service.type) }}{{ end -}}
{{- end -}}
{{- end -}}
{{- $outside := ne $service.type "ClusterIP" -}}
{{- if and (eq .Values.upgrade.type "NewClusterWithIncrementalUpgrade") (or $outside $service.annotations) -}}
{{- fail "service.type: with upgrade.type=NewClusterWithIncrementalUpgrade clients come through KubeRay's Gateway, and KubeRay ignores what is said of the Service; leave type and annotations out, or set upgrade.type=NewCluster" -}}
{{- end -}}
{{- if and $outside .Values.networkPolicy.enabled (not $service.loadBalancerSourceRanges) (eq (toJson .Values.networkPolicy.clients) "[{\"podSelector\":{}}]") -}}
{{- fail (printf "service.type: the NetworkPolicy lets in pods of the namespace alone, so nobody gets through from a %s; give %snetworkPolicy.clients, such as [{ipBlock: {cidr: 203.0.113.0/24}}]" $service.type (ternary "service.loadBalancerSourceRanges or " "" (eq $service.type "LoadBalancer"))) -}}
{{- end -}}
{{- end -}}

{{/* Refuses folders that pods cannot write to: the disk of their image is read-only. */}}
{{- define "squadron.checkFolders" -}}
{{- $writable := list "/tmp" "/var/lib/squadron" -}}
{{- range .Values.extraVolumeMounts }}{{ $writable = append $writable .mountPath }}{{ end -}}
{{- range .Values.workerGroups -}}
{{- range .volumeMounts }}{{ $writable = append $writable .mountPath }}{{ end -}}
{{- end -}}
{{- range $name, $else := dict "batch_dir" "a URL such as s3://bucket/squadron" "record_incidents" "/tmp/incidents" -}}
{{- $folder := get $.Values.app $name | default "" | trimPrefix "file://" -}}
{{- if and $folder (not (contains "://" $folder)) -}}
{{- $held := false -}}
{{- range $writable -}}
{{- if hasPrefix (printf "%s/" (trimSuffix "/" .)) (printf "%s/" $folder) }}{{ $held = true }}{{ end -}}
{{- end -}}
{{- if not $held -}}
{{- fail (printf "app.%s: %s is on no volume, and the disk of the image is read-only; mount one there by extraVolumes and extraVolumeMounts, or give %s" $name $folder $else) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Refuses pods that would be killed while their streams may still run. */}}
{{- define "squadron.checkGrace" -}}
{{- $known := .Files.Get "defaults/app.yaml" | fromYaml -}}
{{- $drain := $known.drain_timeout -}}
{{- with .Values.app.drain_timeout }}{{ $drain = . }}{{ end -}}
{{- $least := addf $drain (int .Values.preStopSeconds) 10 | ceil | int -}}
{{- $grace := int .Values.terminationGracePeriodSeconds -}}
{{- if lt $grace $least -}}
{{- $shorter := sub $grace (add (int .Values.preStopSeconds) 10) -}}
{{- $hint := ternary (printf ", or app.drain_timeout=%d" $shorter) "" (gt $shorter 0) -}}
{{- fail (printf "terminationGracePeriodSeconds: %d ends streams that app.drain_timeout=%v gives more time; with preStopSeconds and 10 s for Ray give at least %d%s" $grace $drain $least $hint) -}}
{{- end -}}
{{- end -}}

{{/* Refuses a way in that leads nowhere: with upgrades in steps there is no Service of this name. */}}
{{- define "squadron.refuseInSteps" -}}
{{- if eq .root.Values.upgrade.type "NewClusterWithIncrementalUpgrade" -}}
{{- fail (printf "%s.enabled: with upgrade.type=NewClusterWithIncrementalUpgrade KubeRay makes a Gateway and a route of its own, %s-gateway, and no Service that lasts; set %s.enabled=false, or upgrade.type=NewCluster" .name (include "squadron.fullname" .root) .name) -}}
{{- end -}}
{{- end -}}
