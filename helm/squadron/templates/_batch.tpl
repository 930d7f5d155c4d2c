{{/* A job that was changed is another job, for one that ended is not run again: its name tells what it does, and not how
     long it may take or is kept. */}}
{{- define "squadron.batchName" -}}
{{- $batch := omit .Values.batch "backoffLimit" "ttlSecondsAfterFinished" "activeDeadlineSeconds" -}}
{{- $does := dict "batch" $batch "settings" (include "squadron.batchSettings" .) "image" (include "squadron.image" .) -}}
{{ include "squadron.fullname" . }}-batch-{{ toJson $does | sha256sum | trunc 5 }}
{{- end -}}

{{/* The model that answers, as of squadron.models. */}}
{{- define "squadron.batchModel" -}}
{{- $models := (include "squadron.models" . | fromJson).models -}}
{{- $number := int .Values.batch.model -}}
{{- if ge $number (len $models) -}}
{{- fail (printf "batch.model: there are %d models, so it must be at most %d, not %d" (len $models) (sub (len $models) 1) $number) -}}
{{- end -}}
{{- index $models $number | toJson -}}
{{- end -}}

{{/* What `squadron batch --config` reads. */}}
{{- define "squadron.batchSettings" -}}
{{- include "squadron.settings" (dict "root" . "model" (include "squadron.batchModel" . | fromJson)) | fromJson | toYaml -}}
{{- end -}}

{{/* The command is in a file, as KubeRay hands the entrypoint through two shells. */}}
{{- define "squadron.batchScript" -}}
{{- $batch := .Values.batch -}}
{{- if not $batch.inputs }}{{ fail "batch.inputs: give at least one file, such as /data/requests.jsonl" }}{{ end -}}
{{- $words := append $batch.inputs (required "batch.output: give a file, such as /data/answers.jsonl" $batch.output) -}}
{{- $words = concat $words (list "--config" "/etc/squadron/batch/settings.yaml" "--resume") -}}
{{- with $batch.ledger }}{{ $words = concat $words (list "--ledger" .) }}{{ end -}}
#!/bin/sh
exec squadron batch
{{- range concat $words (default list $batch.args) }} \
  '{{ replace "'" "'\\''" (toString .) }}'
{{- end }}
{{- end -}}
