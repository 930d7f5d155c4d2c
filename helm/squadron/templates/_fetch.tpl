{{- define "squadron.fetchName" -}}
{{ include "squadron.fullname" . }}-fetch
{{- end -}}

{{/* A file for each worker group for models, as `python -m deploy.fetch --list` reads it. As squadron.groups. */}}
{{- define "squadron.fetchLists" -}}
{{- range (include "squadron.groups" . | fromJson).groups }}
{{- if not .routers }}
{{ .name }}.json: {{ dict "models" .models "tokenizers" .tokenizers | toJson | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{/* The init container of a worker pod. root; group. */}}
{{- define "squadron.fetchContainer" -}}
{{- $root := .root -}}
name: fetch-models
image: {{ include "squadron.image" $root | quote }}
imagePullPolicy: {{ $root.Values.image.pullPolicy }}
command: [python, -m, deploy.fetch, --list, /etc/squadron/fetch/{{ .group.name }}.json]
env:
  {{- include "squadron.workerEnv" . | nindent 2 }}
resources:
  {{- /* It is over before the container starts that needs as much. */}}
  requests: {cpu: 500m, memory: {{ quote .group.memory }}, ephemeral-storage: {{ include "squadron.diskRequest" . | quote }}}
  limits: {memory: {{ quote .group.memory }}, ephemeral-storage: {{ include "squadron.diskLimit" . | quote }}}
securityContext:
  {{- include "squadron.containerSecurity" list | nindent 2 }}
volumeMounts:
  {{- include "squadron.workerMounts" . | nindent 2 }}
  - {name: fetch, mountPath: /etc/squadron/fetch, readOnly: true}
{{- end -}}
