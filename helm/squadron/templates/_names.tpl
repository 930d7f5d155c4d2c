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

{{/* Refuses labels by which KubeRay, or the chart's own policies and budgets, find pods. labels; whose. */}}
{{- define "squadron.refuseLabels" -}}
{{- $taken := list "name" "created-by" "instance" "part-of" "component" "managed-by" "version" -}}
{{- $whose := .whose -}}
{{- range $label, $_ := .labels -}}
{{- if or (hasPrefix "ray.io/" $label) (and (hasPrefix "app.kubernetes.io/" $label) (has (trimPrefix "app.kubernetes.io/" $label) $taken)) -}}
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

{{- define "squadron.image" -}}
{{- $image := .Values.image -}}
{{- if $image.digest -}}
{{ $image.repository }}@{{ $image.digest }}
{{- else -}}
{{ $image.repository }}:{{ default .Chart.AppVersion $image.tag }}
{{- end -}}
{{- end -}}

{{- define "squadron.cacheClaim" -}}
{{- $cache := .Values.modelCache -}}
{{- if eq $cache.type "pvc" -}}
{{ include "squadron.fullname" . }}-models
{{- else if eq $cache.type "existingClaim" -}}
{{ required "modelCache.existingClaim: give the name of the claim, such as models, or another modelCache.type" $cache.existingClaim }}
{{- end -}}
{{- end -}}
