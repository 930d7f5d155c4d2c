{{/* The models with their places in the list, as JSON: {"models": [{"number": 0, "model": {...}, "group": "workers"}]} */}}
{{- define "squadron.models" -}}
{{- $names := list -}}
{{- range $number, $group := .Values.workerGroups -}}
{{- if has $group.name $names -}}
{{- fail (printf "workerGroups[%d].name: %q is the name of another group; give it another, such as %s-%d" $number $group.name $group.name $number) -}}
{{- end -}}
{{- $names = append $names $group.name -}}
{{- end -}}
{{- $models := list -}}
{{- range $number, $model := .Values.models -}}
{{- $group := default (first $names) $model.workerGroup -}}
{{- if not (has $group $names) -}}
{{- fail (printf "models[%d].workerGroup: there is no worker group %q; known: %s" $number $group (join ", " $names)) -}}
{{- end -}}
{{- $models = append $models (dict "number" $number "model" $model "group" $group) -}}
{{- end -}}
{{- dict "models" $models | toJson -}}
{{- end -}}

{{/* Settings of one of these models as the app takes them, as JSON. The device is always said: Serve builds the app when
     pods with accelerators may not be there yet, and would take the model for one of CPUs. */}}
{{- define "squadron.settings" -}}
{{- $settings := dict -}}
{{- range $key, $value := .model.model -}}
{{- if not (or (kindIs "invalid" $value) (eq $key "workerGroup")) -}}
{{- $_ := set $settings $key $value -}}
{{- end -}}
{{- end -}}
{{- range .root.Values.workerGroups -}}
{{- if and (eq .name $.model.group) (not (hasKey $settings "device")) -}}
{{- $_ := set $settings "device" (ternary "cuda" "cpu" (not (empty (dig "accelerator" "resource" "" .)))) -}}
{{- end -}}
{{- end -}}
{{- toJson $settings -}}
{{- end -}}

{{/* Worker groups for some of these models with all filled in that was left open, as JSON: {"groups": [...]}.
     root; models: as of squadron.models; lone: what of a group that no model names: true = left out, false = refused. */}}
{{- define "squadron.groups" -}}
{{- $root := .root -}}
{{- $groups := list -}}
{{- range $number, $given := $root.Values.workerGroups -}}
{{- $group := $root.Files.Get "defaults/worker-group.yaml" | fromYaml -}}
{{- range $key, $value := $given }}{{ $_ := set $group $key $value }}{{ end -}}
{{- $models := list -}}
{{- range $.models }}{{ if eq .group $group.name }}{{ $models = append $models . }}{{ end }}{{ end -}}
{{- if $models -}}
{{- $groups = append $groups (include "squadron.sizedGroup" (dict "root" $root "group" $group "models" $models "first" (eq $number 0)) | fromJson) -}}
{{- else if not $.lone -}}
{{- fail (printf "workerGroups[%d].name: no model runs in %q; name it in models[].workerGroup, or leave the group out" $number $group.name) -}}
{{- end -}}
{{- end -}}
{{- dict "groups" $groups | toJson -}}
{{- end -}}

{{/* One group with the numbers of its pods, as JSON. A replica that fits into a pod shares it with others of its model; a
     larger one has a set of pods (numOfHosts) of its own. */}}
{{- define "squadron.sizedGroup" -}}
{{- $group := .group -}}
{{- $largest := 1 -}}
{{- $cpus := 0.0 -}}
{{- range .models -}}
{{- $largest = max $largest (int (default 1 .model.tensor_parallel_size)) -}}
{{- $cpus = maxf $cpus (float64 (dig "cpus_per_worker" 1.0 .model)) -}}
{{- end -}}
{{- $ranks := int (default $largest $group.ranksPerPod) -}}
{{- $hosts := 0 -}}
{{- $start := 0 -}}{{- $least := 0 -}}{{- $most := 0 -}}
{{- range .models -}}
{{- $size := int (default 1 .model.tensor_parallel_size) -}}
{{- $own := 1 -}}{{- $perPod := 1 -}}
{{- if gt $size $ranks -}}
{{- if mod $size $ranks -}}
{{- fail (printf "models[%d].tensor_parallel_size: %d ranks do not fill pods of workerGroups %q with ranksPerPod=%d; give a ranksPerPod that divides %d" (int .number) $size $group.name $ranks $size) -}}
{{- end -}}
{{- $own = int (div $size $ranks) -}}
{{- else -}}
{{- $perPod = int (div $ranks $size) -}}
{{- end -}}
{{- if and $hosts (ne $hosts $own) -}}
{{- fail (printf "models[%d].workerGroup: in %q another model's replicas take %d pods each, this one's %d; give it a group of its own" (int .number) $group.name $hosts $own) -}}
{{- end -}}
{{- $hosts = $own -}}
{{- $replicas := int (default 1 .model.replicas) -}}
{{- $upTo := int (default $replicas .model.max_replicas) -}}
{{- $from := $replicas -}}
{{- if .model.max_replicas -}}
{{- $from = ternary 1 (int .model.min_replicas) (kindIs "invalid" .model.min_replicas) -}}
{{- end -}}
{{- $start = add $start (ceil (divf $replicas $perPod)) -}}
{{- $least = add $least (ceil (divf $from $perPod)) -}}
{{- $most = add $most (ceil (divf $upTo $perPod)) -}}
{{- end -}}
{{- if not .root.Values.autoscaling.enabled }}{{ $start = $most }}{{ $least = $most }}{{ end -}}
{{- if not (kindIs "invalid" $group.replicas) }}{{ $start = $group.replicas }}{{ end -}}
{{- if .root.Values.autoscaling.enabled -}}
{{- if .first }}{{ $least = max 1 $least }}{{ end -}}
{{- if not (kindIs "invalid" $group.minReplicas) }}{{ $least = $group.minReplicas }}{{ end -}}
{{- if not (kindIs "invalid" $group.maxReplicas) }}{{ $most = $group.maxReplicas }}{{ end -}}
{{- $start = max $start $least -}}
{{- if gt (int $start) (int $most) -}}
{{- fail (printf "workerGroups %q: maxReplicas is %d, but its models begin with %d; raise maxReplicas" $group.name (int $most) (int $start)) -}}
{{- end -}}
{{- else -}}
{{- $least = $start }}{{ $most = $start -}}
{{- end -}}
{{- $beside := max 1 (ceil (mulf 0.25 (add 1 (int (default 1 .root.Values.app.routers))))) -}}
{{- $cpu := default (addf (mulf $ranks $cpus) $beside | toString) (toString (default "" $group.cpu)) -}}
{{- $numCpus := ternary (divf (trimSuffix "m" $cpu | float64) 1000) (float64 $cpu) (hasSuffix "m" $cpu) | ceil -}}
{{- $names := list -}}
{{- range .models }}{{ $names = append $names .model.model }}{{ end -}}
{{- $sized := dict "models" (uniq $names) "ranks" $ranks "hosts" $hosts "replicas" $start "minReplicas" $least "maxReplicas" $most "cpu" $cpu "numCpus" $numCpus -}}
{{- range $key, $value := $sized }}{{ $_ := set $group $key $value }}{{ end -}}
{{- toJson $group -}}
{{- end -}}
