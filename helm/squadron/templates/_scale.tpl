{{/* The spec of the Job that sets numbers of pods. Kubernetes changes none of it: no label of the chart's version is in it.
     root; pod: as of squadron.podSpec; counts: by worker group. */}}
{{- define "squadron.scaleSpec" -}}
{{- $root := .root -}}
backoffLimit: 4
template:
  metadata:
    {{- include "squadron.podMetadata" .pod | nindent 4 }}
  spec:
    restartPolicy: Never
    {{- include "squadron.podSpec" .pod | nindent 4 }}
    containers:
      - name: scale
        image: {{ include "squadron.image" $root | quote }}
        imagePullPolicy: {{ $root.Values.image.pullPolicy }}
        command: [python, -m, deploy.scale, {{ include "squadron.fullname" $root }}, --namespace, {{ $root.Release.Namespace | quote }}, --groups, {{ toJson .counts | quote }}]
        env:
          - {name: HOME, value: /var/lib/squadron}
          - {name: USER, value: squadron}
        resources:
          requests: {cpu: 100m, memory: 256Mi, ephemeral-storage: 100Mi}
          limits: {memory: 512Mi, ephemeral-storage: 1Gi}
        securityContext:
          {{- include "squadron.containerSecurity" list | nindent 10 }}
        volumeMounts:
          - {name: home, mountPath: /var/lib/squadron}
          - {name: kubernetes-token, mountPath: /var/run/secrets/kubernetes.io/serviceaccount, readOnly: true}
    volumes:
      - {name: home, emptyDir: {sizeLimit: 100Mi}}
      {{- include "squadron.tokenVolume" list | nindent 6 }}
{{- end -}}

{{/* A token of the pod's service account, for one container alone. */}}
{{- define "squadron.tokenVolume" -}}
- name: kubernetes-token
  projected:
    sources:
      - serviceAccountToken: {path: token, expirationSeconds: 3607}
      - configMap: {name: kube-root-ca.crt, items: [{key: ca.crt, path: ca.crt}]}
      - downwardAPI: {items: [{path: namespace, fieldRef: {fieldPath: metadata.namespace}}]}
{{- end -}}
