{{/* Environment of every Ray container. What Ray is started with is what `squadron serve` starts it with. */}}
{{- define "squadron.env" -}}
- {name: HOME, value: /var/lib/squadron}
{{- /* The user may be one that the image does not know, and Python looks for his name here first. */}}
- {name: USER, value: squadron}
- {name: HF_HOME, value: /var/cache/squadron}
- {name: HF_HUB_DISABLE_TELEMETRY, value: "1"}
{{- /* Where else libraries and Ray write. Most of it would lie there anyway, unless an image sets it for a root that can be
       written to. */}}
- {name: TMPDIR, value: /tmp}
- {name: RAY_TMPDIR, value: /tmp}
{{- range $name, $folder := dict "XDG_CACHE_HOME" ".cache" "CUDA_CACHE_PATH" ".cache/cuda" "MPLCONFIGDIR" ".cache/matplotlib" "NUMBA_CACHE_DIR" ".cache/numba" "TORCHINDUCTOR_CACHE_DIR" ".cache/torchinductor" "TORCH_EXTENSIONS_DIR" ".cache/torch_extensions" "TORCH_HOME" ".cache/torch" "TRITON_CACHE_DIR" ".cache/triton" "TVM_FFI_CACHE_DIR" ".cache/tvm-ffi" "XDG_CONFIG_HOME" ".config" }}
- {name: {{ $name }}, value: /var/lib/squadron/{{ $folder }}}
{{- end }}
- {name: PYTHONDONTWRITEBYTECODE, value: "1"}
{{- if .Values.hub.offline }}
- {name: HF_HUB_OFFLINE, value: "1"}
{{- end }}
{{- with .Values.hub.existingSecret }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ quote . }}, key: {{ quote $.Values.hub.tokenKey }}}}
{{- end }}
- {name: GOMP_SPINCOUNT, value: "1000"}
- {name: RAY_USAGE_STATS_ENABLED, value: "0"}
- {name: RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO, value: "0"}
- {name: RAY_kill_worker_timeout_milliseconds, value: "1000"}
- {name: RAY_prestart_worker_first_driver, value: "0"}
- {name: RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS, value: "1"}
- {name: RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S, value: "0.5"}
- {name: RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S, value: "1.5"}
- {name: RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S, value: "20"}
- {name: RAY_SERVE_PROXY_GRACEFUL_SHUTDOWN_TIMEOUT_S, value: "0.5"}
- {name: RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH, value: "cluster.ingress.guard:proxy_middlewares"}
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Environment of a worker's Ray containers. root; group. */}}
{{- define "squadron.workerEnv" -}}
{{- include "squadron.env" .root }}
{{- $drain := sub (int .root.Values.terminationGracePeriodSeconds) (add (int .root.Values.preStopSeconds) 10) | max 0 }}
{{- /* On SIGTERM Ray drains the pod's node, and waits for so long until what runs there has gone elsewhere. */}}
- {name: RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S, value: {{ quote $drain }}}
{{- range $name, $value := .group.nccl }}
- {name: {{ $name }}, value: {{ quote $value }}}
{{- end }}
{{- with .group.env }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "squadron.podSecurity" -}}
runAsNonRoot: true
{{- range $key := list "runAsUser" "runAsGroup" "fsGroup" }}
{{- with get $.Values.security $key }}
{{ $key }}: {{ int . }}
{{- end }}
{{- end }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{/* What is given are capabilities that a container has all the same. */}}
{{- define "squadron.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities:
  drop: [ALL]
  {{- with . }}
  add: {{ toJson . }}
  {{- end }}
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "squadron.volumeMounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: home, mountPath: /var/lib/squadron}
- {name: shared-memory, mountPath: /dev/shm}
- {name: models, mountPath: /var/cache/squadron}
{{- if .Values.apiKeys.existingSecret }}
- {name: keys, mountPath: /etc/squadron/keys, readOnly: true}
{{- end }}
{{- with .Values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* root; group. */}}
{{- define "squadron.workerMounts" -}}
{{- include "squadron.volumeMounts" .root }}
{{- with .group.volumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* The bytes of a quantity such as 4Gi. */}}
{{- define "squadron.bytes" -}}
{{- $units := dict "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "Ki" 1024.0 "Mi" 1048576.0 "Gi" 1073741824.0 "Ti" 1099511627776.0 "m" 0.001 -}}
{{- mulf (regexFind "^[0-9.]+" . | float64) (default 1.0 (get $units (regexFind "[A-Za-z]*$" .))) | int64 -}}
{{- end -}}

{{/* The size of a pod's cache of models on its node's disk; empty = it lies elsewhere. The head has a small one of its own,
     as it reads no weights: where it shared the workers' claim, that might tie both to one node. root; head: whether. */}}
{{- define "squadron.cacheOnDisk" -}}
{{- $values := .root.Values -}}
{{- if eq $values.modelCache.type "none" -}}
{{ $values.modelCache.size }}
{{- else if .head -}}
{{ $values.disk.home }}
{{- end -}}
{{- end -}}

{{/* What a pod may write to its node's disk: its volumes there, and a Gi for what its containers print. root; head. */}}
{{- define "squadron.diskLimit" -}}
{{- $disk := .root.Values.disk -}}
{{- $room := addf (include "squadron.bytes" $disk.tmp) (include "squadron.bytes" $disk.home) 1073741824.0 -}}
{{- with include "squadron.cacheOnDisk" . }}{{ $room = addf $room (include "squadron.bytes" .) }}{{ end -}}
{{ divf $room 1073741824.0 | ceil | int64 }}Gi
{{- end -}}

{{/* What a pod asks of its node's disk. Refused where it may not write as much. root; head. */}}
{{- define "squadron.diskRequest" -}}
{{- $most := include "squadron.diskLimit" . -}}
{{- $request := .root.Values.disk.request -}}
{{- if gt (include "squadron.bytes" $request | int64) (include "squadron.bytes" $most | int64) -}}
{{- fail (printf "disk.request: %s is more than the %s that a pod may write; raise disk.tmp or disk.home, or give at most %s" $request $most $most) -}}
{{- end -}}
{{ $request }}
{{- end -}}

{{/* root; of: head or worker group; batch: whether the pod is that of a batch, whose head reads an existing claim. */}}
{{- define "squadron.volumes" -}}
{{- $values := .root.Values -}}
{{- $room := include "squadron.bytes" .of.sharedMemory | int64 -}}
{{- if gt (int64 .of.objectStoreBytes) $room -}}
{{- $whose := "head" -}}
{{- with .of.name }}{{ $whose = printf "workerGroups %q" . }}{{ end -}}
{{- fail (printf "%s.objectStoreBytes: %d are more than sharedMemory=%s holds, so that Ray would keep objects on disk; give at most %d" $whose (int64 .of.objectStoreBytes) .of.sharedMemory $room) -}}
{{- end -}}
{{- $memory := include "squadron.bytes" .of.memory | int64 -}}
{{- if ge $room $memory -}}
{{- $whose := "head" -}}
{{- with .of.name }}{{ $whose = printf "workerGroups %q" . }}{{ end -}}
{{- fail (printf "%s.sharedMemory: %s is in the pod's memory=%s and leaves nothing of it; give less, or more memory" $whose .of.sharedMemory .of.memory) -}}
{{- end -}}
{{- include "squadron.checkMounts" . -}}
- {name: tmp, emptyDir: {sizeLimit: {{ quote $values.disk.tmp }}}}
- {name: home, emptyDir: {sizeLimit: {{ quote $values.disk.home }}}}
- {name: shared-memory, emptyDir: {medium: Memory, sizeLimit: {{ quote .of.sharedMemory }}}}
{{- $cache := $values.modelCache }}
{{- $claim := include "squadron.cacheClaim" .root }}
{{- $head := empty .of.name }}
{{- if and $claim (or (not $head) (and .batch (eq $cache.type "existingClaim"))) }}
- {name: models, persistentVolumeClaim: {claimName: {{ quote $claim }}}}
{{- else if and (eq $cache.type "ephemeral") (not $head) }}
- name: models
  ephemeral:
    volumeClaimTemplate:
      spec:
        accessModes: [ReadWriteOnce]
        {{- if not (kindIs "invalid" $cache.storageClassName) }}
        storageClassName: {{ quote $cache.storageClassName }}
        {{- end }}
        resources:
          requests: {storage: {{ quote $cache.size }}}
{{- else }}
- {name: models, emptyDir: {sizeLimit: {{ include "squadron.cacheOnDisk" (dict "root" .root "head" $head) | quote }}}}
{{- end }}
{{- with $values.apiKeys.existingSecret }}
- name: keys
  secret:
    secretName: {{ quote . }}
    defaultMode: 0440
    items:
      - {key: {{ quote $values.apiKeys.fileKey }}, path: keys.yaml}
      - {key: {{ quote $values.apiKeys.probeKey }}, path: probe-key}
{{- end }}
{{- range $whose, $volumes := dict "extraVolumes" $values.extraVolumes "volumes" .of.volumes }}
{{- if eq $whose "volumes" }}{{ $whose = printf "workerGroups %q.volumes" $.of.name }}{{ end }}
{{- range $number, $volume := $volumes }}
{{- if has $volume.name (list "tmp" "home" "shared-memory" "models" "keys" "batch" "fetch" "kubernetes-token") }}
{{- fail (printf "%s[%d].name: %s is a volume of the chart; take another, such as my-%s" $whose $number $volume.name $volume.name) }}
{{- end }}
{{- end }}
{{- end }}
{{- with $values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- with .of.volumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Refuses mounts that Kubernetes would refuse when pods are made. root; of: head or worker group. */}}
{{- define "squadron.checkMounts" -}}
{{- $known := list "tmp" "home" "shared-memory" "models" "keys" "batch" "fetch" -}}
{{- range concat (default list .root.Values.extraVolumes) (default list .of.volumes) }}{{ $known = append $known .name }}{{ end -}}
{{- $paths := list "/tmp" "/dev/shm" "/var/lib/squadron" "/var/cache/squadron" "/etc/squadron/keys" -}}
{{- range $whose, $mounts := dict "extraVolumeMounts" .root.Values.extraVolumeMounts "volumeMounts" .of.volumeMounts -}}
{{- if eq $whose "volumeMounts" }}{{ $whose = printf "workerGroups %q.volumeMounts" $.of.name }}{{ end -}}
{{- range $number, $mount := $mounts -}}
{{- if not (has $mount.name $known) -}}
{{- fail (printf "%s[%d].name: there is no volume %q; add one of that name to extraVolumes, or to the group's volumes" $whose $number (toString $mount.name)) -}}
{{- end -}}
{{- if has $mount.mountPath $paths -}}
{{- fail (printf "%s[%d].mountPath: something is mounted at %s already; take another path, such as /data" $whose $number $mount.mountPath) -}}
{{- end -}}
{{- $paths = append $paths $mount.mountPath -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* An exec probe that needs no shell, wget or curl. root; probes: their names; failures. */}}
{{- define "squadron.probe" -}}
exec:
  command: [python, -m, deploy.probe, {{ join ", " .probes }}, --seconds={{ int .root.Values.probes.timeoutSeconds }}]
periodSeconds: {{ int .root.Values.probes.periodSeconds }}
timeoutSeconds: {{ int .root.Values.probes.timeoutSeconds }}
failureThreshold: {{ int .failures }}
{{- end -}}

{{/* Where all pods may be placed, and as whom they run. root; of: head or worker group. */}}
{{- define "squadron.podSpec" -}}
{{- $values := .root.Values -}}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with default $values.serviceAccountName .of.serviceAccountName }}
serviceAccountName: {{ quote . }}
{{- end }}
{{- with $values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ if kindIs "string" . }}{{ quote . }}{{ else }}{{ quote .name }}{{ end }}
  {{- end }}
{{- end }}
securityContext:
  {{- include "squadron.podSecurity" .root | nindent 2 }}
{{- /* The head has nothing to hand over, and another one waits for its end. */}}
terminationGracePeriodSeconds: {{ ternary (int $values.terminationGracePeriodSeconds) (min 60 (int $values.terminationGracePeriodSeconds)) (not (empty .of.name)) }}
{{- range $key := list "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" "priorityClassName" "runtimeClassName" "schedulerName" "resourceClaims" }}
{{- with get $.of $key }}
{{ $key }}: {{ toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- end -}}

{{/* root; of: head or worker group; component: label by which policies and budgets know the pod. */}}
{{- define "squadron.podMetadata" -}}
{{- $whose := "head" -}}
{{- with .of.name }}{{ $whose = printf "workerGroups %q" . }}{{ end -}}
{{- include "squadron.refuseLabels" (dict "labels" .of.labels "whose" (printf "%s.labels" $whose)) -}}
labels:
  {{- include "squadron.selector" .root | nindent 2 }}
  app.kubernetes.io/component: {{ .component }}
  {{- with .of.labels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with .of.annotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}
