{{/* A RayCluster's spec. root; groups: of squadron.groups; batch: whether it is that of the RayJob. */}}
{{- define "squadron.cluster" -}}
{{- $root := .root -}}
{{- $values := .root.Values -}}
rayVersion: {{ $values.rayVersion | quote }}
authOptions:
  mode: {{ ternary "token" "disabled" $values.rayToken.enabled }}
  {{- if and $values.rayToken.enabled $values.rayToken.existingSecret }}
  secretName: {{ quote $values.rayToken.existingSecret }}
  {{- end }}
{{- if and $values.faultTolerance.enabled (not .batch) }}
gcsFaultToleranceOptions:
  {{- include "squadron.faultTolerance" $values.faultTolerance | nindent 2 }}
{{- end }}
enableInTreeAutoscaling: {{ $values.autoscaling.enabled }}
{{- if $values.autoscaling.enabled }}
autoscalerOptions:
  {{- include "squadron.autoscaler" . | nindent 2 }}
{{- end }}
headGroupSpec:
  rayStartParams:
    dashboard-host: "0.0.0.0"
    num-cpus: "0"
    num-gpus: "0"
    object-store-memory: {{ int64 $values.head.objectStoreBytes | quote }}
  template:
    {{- include "squadron.headPod" . | nindent 4 }}
workerGroupSpecs:
  {{- range .groups }}
  - groupName: {{ .name }}
    replicas: {{ int .replicas }}
    minReplicas: {{ int .minReplicas }}
    maxReplicas: {{ int .maxReplicas }}
    numOfHosts: {{ int .hosts }}
    rayStartParams:
      num-cpus: {{ int .numCpus | quote }}
      num-gpus: {{ ternary (int .ranks) 0 (not (empty (include "squadron.accelerated" .))) | quote }}
      {{- if .routers }}
      resources: {{ printf "\"{\\\"%s\\\": 1000}\"" (include "squadron.routerResource" $root) | squote }}
      {{- end }}
      object-store-memory: {{ int64 .objectStoreBytes | quote }}
    template:
      {{- include "squadron.workerPod" (dict "root" $root "group" . "batch" $.batch) | nindent 6 }}
  {{- end }}
{{- end -}}

{{- define "squadron.faultTolerance" -}}
redisAddress: {{ required "faultTolerance.redisAddress: give the address of Redis, such as redis:6379" .redisAddress | quote }}
{{- if .existingSecret }}
redisPassword:
  valueFrom: {secretKeyRef: {name: {{ quote .existingSecret }}, key: {{ quote .passwordKey }}}}
{{- if .usernameKey }}
redisUsername:
  valueFrom: {secretKeyRef: {name: {{ quote .existingSecret }}, key: {{ quote .usernameKey }}}}
{{- end }}
{{- end }}
{{- end -}}

{{/* The autoscaler is the one container that speaks with Kubernetes: the token is mounted here and nowhere else. */}}
{{- define "squadron.autoscaler" -}}
{{- $autoscaling := .root.Values.autoscaling -}}
version: v2
idleTimeoutSeconds: {{ int $autoscaling.idleTimeoutSeconds }}
upscalingMode: {{ $autoscaling.upscalingMode }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
resources:
  requests: {cpu: {{ $autoscaling.cpu | quote }}, memory: {{ quote $autoscaling.memory }}, ephemeral-storage: 100Mi}
  limits: {memory: {{ quote $autoscaling.memory }}, ephemeral-storage: 1Gi}
securityContext:
  {{- include "squadron.containerSecurity" list | nindent 2 }}
env:
  - {name: HOME, value: /var/lib/squadron}
volumeMounts:
  - {name: tmp, mountPath: /tmp}
  - {name: home, mountPath: /var/lib/squadron}
  - {name: kubernetes-token, mountPath: /var/run/secrets/kubernetes.io/serviceaccount, readOnly: true}
{{- end -}}

{{- define "squadron.headPod" -}}
{{- $root := .root -}}
{{- $head := .root.Values.head -}}
{{- $pod := dict "root" $root "of" $head "component" (ternary "batch-head" "head" .batch) -}}
metadata:
  {{- include "squadron.podMetadata" $pod | nindent 2 }}
spec:
  {{- include "squadron.podSpec" $pod | nindent 2 }}
  containers:
    - name: ray-head
      image: {{ include "squadron.image" $root | quote }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      ports:
        - {name: gcs-server, containerPort: 6379}
        - {name: dashboard, containerPort: 8265}
        - {name: metrics, containerPort: 8080}
        - {name: serve, containerPort: {{ int $root.Values.service.port }}}
      env:
        {{- include "squadron.env" $root | nindent 8 }}
        - {name: RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S, value: "0"}
      resources:
        requests:
          cpu: {{ $head.cpu | quote }}
          memory: {{ quote $head.memory }}
          ephemeral-storage: {{ include "squadron.diskRequest" (dict "root" $root "head" true) | quote }}
        limits:
          memory: {{ quote $head.memory }}
          ephemeral-storage: {{ include "squadron.diskLimit" (dict "root" $root "head" true) | quote }}
      securityContext:
        {{- include "squadron.containerSecurity" list | nindent 8 }}
      {{- $probes := list "raylet" "gcs" }}
      startupProbe:
        {{- include "squadron.probe" (dict "root" $root "probes" $probes "failures" $root.Values.probes.startupFailures) | nindent 8 }}
      livenessProbe:
        {{- include "squadron.probe" (dict "root" $root "probes" $probes "failures" $root.Values.probes.livenessFailures) | nindent 8 }}
      readinessProbe:
        {{- include "squadron.probe" (dict "root" $root "probes" $probes "failures" $root.Values.probes.readinessFailures) | nindent 8 }}
      volumeMounts:
        {{- include "squadron.volumeMounts" $root | nindent 8 }}
        {{- if .batch }}
        - {name: batch, mountPath: /etc/squadron/batch, readOnly: true}
        {{- end }}
  volumes:
    {{- include "squadron.volumes" (dict "root" $root "of" $head "batch" .batch) | nindent 4 }}
    {{- if .batch }}
    - {name: batch, configMap: {name: {{ include "squadron.batchName" $root }}}}
    {{- end }}
    {{- if $root.Values.autoscaling.enabled }}
    {{- include "squadron.tokenVolume" list | nindent 4 }}
    {{- end }}
{{- end -}}

{{- define "squadron.workerPod" -}}
{{- $root := .root -}}
{{- $group := .group -}}
{{- $pod := dict "root" $root "of" $group "component" (ternary "batch-worker" "worker" .batch) -}}
{{- $own := dict "root" $root "group" $group "head" false -}}
{{- $devices := dict -}}
{{- with $group.accelerator.resource }}{{ $_ := set $devices . (int $group.ranks) }}{{ end -}}
{{- range $name, $amount := $group.resources }}{{ $_ := set $devices $name $amount }}{{ end -}}
{{- $disk := dict "request" (include "squadron.diskRequest" $own) "limit" (include "squadron.diskLimit" $own) -}}
{{- $port := printf "--port=%d" (int $root.Values.service.port) -}}
metadata:
  {{- include "squadron.podMetadata" $pod | nindent 2 }}
spec:
  {{- include "squadron.podSpec" $pod | nindent 2 }}
  {{- $fetch := and $root.Values.modelCache.fetch (not $group.routers) }}
  {{- if or $fetch $group.initContainers }}
  initContainers:
    {{- with $group.initContainers }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    {{- if $fetch }}
    - {{- include "squadron.fetchContainer" $own | nindent 6 }}
    {{- end }}
  {{- end }}
  containers:
    - name: ray-worker
      image: {{ include "squadron.image" $root | quote }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      ports:
        - {name: metrics, containerPort: 8080}
        - {name: serve, containerPort: {{ int $root.Values.service.port }}}
      env:
        {{- include "squadron.workerEnv" $own | nindent 8 }}
      resources:
        requests:
          {{- merge (dict "cpu" $group.cpu "memory" $group.memory "ephemeral-storage" $disk.request) $devices | toYaml | nindent 10 }}
        limits:
          {{- merge (dict "memory" $group.memory "ephemeral-storage" $disk.limit) $devices | toYaml | nindent 10 }}
        {{- with $group.resourceClaims }}
        claims:
          {{- range . }}
          - {name: {{ .name }}}
          {{- end }}
        {{- end }}
      securityContext:
        {{- include "squadron.containerSecurity" $group.capabilities | nindent 8 }}
      {{- /* Clients' load balancers hear that the pod ends while it still takes connections. */}}
      {{- with int $root.Values.preStopSeconds }}
      lifecycle:
        preStop:
          exec: {command: [sleep, {{ quote . }}]}
      {{- end }}
      startupProbe:
        {{- include "squadron.probe" (dict "root" $root "probes" (list "raylet") "failures" $root.Values.probes.startupFailures) | nindent 8 }}
      livenessProbe:
        {{- include "squadron.probe" (dict "root" $root "probes" (list "raylet") "failures" $root.Values.probes.livenessFailures) | nindent 8 }}
      readinessProbe:
        {{- $probes := ternary (list "raylet") (list "raylet" "app" $port) .batch }}
        {{- include "squadron.probe" (dict "root" $root "probes" $probes "failures" $root.Values.probes.readinessFailures) | nindent 8 }}
      volumeMounts:
        {{- include "squadron.workerMounts" $own | nindent 8 }}
    {{- with $group.sidecars }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  volumes:
    {{- include "squadron.volumes" (dict "root" $root "of" $group "batch" .batch) | nindent 4 }}
    {{- if $fetch }}
    - {name: fetch, configMap: {name: {{ include (ternary "squadron.batchName" "squadron.fetchName" .batch) $root }}}}
    {{- end }}
{{- end -}}
