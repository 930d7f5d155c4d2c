{{/* Name of all objects; short enough for what KubeRay appends, and a DNS label that begins with a letter. What is cut off
     of a long one counts still, so that two releases do not meet under one name. */}}
{{- define "squadron.fullname" -}}
{{- $chart := default .Chart.Name .Values.nameOverride -}}
{{- $name := ternary .Release.Name (printf "%s-%s" .Release.Name $chart) (contains $chart .Release.Name) -}}
{{- with .Values.fullnameOverride -}}
{{- if gt (len .) 34 -}}
{{- fail (printf "fullnameOverride: KubeRay leaves room for 34 characters, %q has %d; give a shorter one such as llm" . (len .)) -}}
{{- end -}}
{{- $name = . -}}
{{- end -}}
{{- if gt (len $name) 34 }}{{ $name = printf "%s-%s" (trunc 28 $name | trimSuffix "-") (sha256sum $name | trunc 5) }}{{ end -}}
{{- if not (regexMatch "^[a-z][-a-z0-9]*$" $name) -}}
{{- fail (printf "fullnameOverride: KubeRay takes names of a-z, 0-9 and - that begin with a letter, not %q; give one such as llm" $name) -}}
{{- end -}}
{{- $name -}}
{{- end -}}

{{/* Refuses labels by which KubeRay, or the chart's own policies and budgets, find pods. Those that tell KubeRay how to
     schedule the pods of a cluster together are the user's. labels; whose. */}}
{{- define "squadron.refuseLabels" -}}
{{- $taken := list "name" "created-by" "instance" "part-of" "component" "managed-by" "version" -}}
{{- $whose := .whose -}}
{{- range $label, $_ := .labels -}}
{{- $gang := has $label (list "ray.io/gang-scheduling-enabled" "ray.io/scheduler-name" "ray.io/priority-class-name") -}}
{{- if or (and (hasPrefix "ray.io/" $label) (not $gang)) (and (hasPrefix "app.kubernetes.io/" $label) (has (trimPrefix "app.kubernetes.io/" $label) $taken)) -}}
{{- fail (printf "%s: %s is KubeRay's or the chart's own, to find pods by; take another, such as example.com/team" $whose $label) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "squadron.labels" -}}
{{- include "squadron.refuseLabels" (dict "labels" .Values.labels "whose" "labels") -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | quote }}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{ include "squadron.selector" . }}
{{- with .Values.labels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* What all pods of a release have. KubeRay's own Services select pods by app.kubernetes.io/name and created-by, which
     must therefore be left to it. */}}
{{- define "squadron.selector" -}}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/part-of: squadron
{{- end -}}

{{/* The Service that KubeRay makes of a RayService for its clients. */}}
{{- define "squadron.serveService" -}}
{{ include "squadron.fullname" . }}-serve-svc
{{- end -}}

{{/* One image for all pods: Ray's processes must be of one version. CUDA's libraries are in that for GPUs alone. */}}
{{- define "squadron.image" -}}
{{- $image := .Values.image -}}
{{- $name := $image.repository -}}
{{- with $image.registry }}{{ $name = printf "%s/%s" . $name }}{{ end -}}
{{- $tag := .Chart.AppVersion -}}
{{- range .Values.workerGroups -}}
{{- if include "squadron.accelerated" . }}{{ $tag = printf "%s-cuda" $.Chart.AppVersion }}{{ end -}}
{{- end -}}
{{- if $image.digest -}}
{{ $name }}@{{ $image.digest }}
{{- else -}}
{{ $name }}:{{ default $tag $image.tag }}
{{- end -}}
{{- end -}}

{{/* "true" where ranks of a worker group have accelerators. */}}
{{- define "squadron.accelerated" -}}
{{- if or (dig "accelerator" "resource" "" .) (dig "accelerator" "claim" "" .) }}true{{ end -}}
{{- end -}}

{{/* Access modes of the release's claim, as JSON: for several nodes only where several pods may mount it at a time. */}}
{{- define "squadron.cacheModes" -}}
{{- $pods := 0 -}}
{{- $models := (include "squadron.models" . | fromJson).models -}}
{{- $clusters := list -}}
{{- if .Values.service.enabled }}{{ $clusters = append $clusters (dict "root" . "models" $models "lone" false) }}{{ end -}}
{{- if .Values.batch.enabled }}{{ $clusters = append $clusters (dict "root" . "models" (list (include "squadron.batchModel" . | fromJson)) "lone" true) }}{{ end -}}
{{- range $clusters -}}
{{- range (include "squadron.groups" . | fromJson).groups }}{{ $pods = add $pods (mul (int .maxReplicas) (int .hosts)) }}{{ end -}}
{{- end -}}
{{- $modes := .Values.modelCache.accessModes -}}
{{- if $modes -}}
{{- if and (gt $pods 1) (not (has "ReadWriteMany" $modes)) -}}
{{- fail (printf "modelCache.accessModes: %d pods mount the claim, and only those on one node can with %s; give [ReadWriteMany], or modelCache.type=ephemeral" $pods (join ", " $modes)) -}}
{{- end -}}
{{- else -}}
{{- $updated := and .Values.service.enabled (ne .Values.upgrade.type "None") -}}
{{- $modes = list (ternary "ReadWriteMany" "ReadWriteOnce" (or $updated (gt $pods 1))) -}}
{{- end -}}
{{- toJson $modes -}}
{{- end -}}

{{/* The claim that worker pods share, if they do. */}}
{{- define "squadron.cacheClaim" -}}
{{- $cache := .Values.modelCache -}}
{{- if eq $cache.type "pvc" -}}
{{ include "squadron.fullname" . }}-models
{{- else if eq $cache.type "existingClaim" -}}
{{ required "modelCache.existingClaim: give the name of the claim, such as models, or another modelCache.type" $cache.existingClaim }}
{{- end -}}
{{- end -}}
