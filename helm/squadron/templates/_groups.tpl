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
{{- $owners := dict -}}
{{- range $number, $model := .Values.models -}}
{{- $group := default (first $names) $model.workerGroup -}}
{{- if not (has $group $names) -}}
{{- fail (printf "models[%d].workerGroup: there is no worker group %q; known: %s" $number $group (join ", " $names)) -}}
{{- end -}}
{{- include "squadron.checkReplicas" (dict "number" $number "model" $model) -}}
{{- include "squadron.checkBlocks" (dict "number" $number "model" $model) -}}
{{- range $name := (include "squadron.names" $model | fromJson).names -}}
{{- if hasKey $owners $name -}}
{{- $owner := int (get $owners $name) -}}
{{- if ne $owner $number -}}
{{- fail (printf "models[%d].served_model_name: %q is the name of models[%d] already; give it another, such as %s-%d" $number $name $owner $name (add1 $number)) -}}
{{- end -}}
{{- end -}}
{{- $_ := set $owners $name $number -}}
{{- end -}}
{{- $models = append $models (dict "number" $number "model" $model "group" $group) -}}
{{- end -}}
{{- dict "models" $models | toJson -}}
{{- end -}}

{{/* The names that clients may use for a model, as JSON: {"names": [...]}. */}}
{{- define "squadron.names" -}}
{{- $names := default (list (splitList "/" (trimSuffix "/" .model) | last)) .served_model_name -}}
{{- if kindIs "string" $names }}{{ $names = splitList "," $names }}{{ end -}}
{{- $plain := list -}}
{{- range $names }}{{ $plain = append $plain (trim .) }}{{ end -}}
{{- dict "names" $plain | toJson -}}
{{- end -}}

{{/* Refuses what the app would refuse when its pods have been paid for already. number; model. */}}
{{- define "squadron.checkReplicas" -}}
{{- $replicas := int (default 1 .model.replicas) -}}
{{- $least := ternary 1 (int .model.min_replicas) (kindIs "invalid" .model.min_replicas) -}}
{{- if .model.max_replicas -}}
{{- $most := int .model.max_replicas -}}
{{- if gt $least $most -}}
{{- fail (printf "models[%d].min_replicas: %d is more than max_replicas=%d; give at most that" .number $least $most) -}}
{{- end -}}
{{- if or (lt $replicas (max 1 $least)) (gt $replicas $most) -}}
{{- fail (printf "models[%d].replicas: must lie between %d and %d, as min_replicas and max_replicas say, not %d" .number (max 1 $least) $most $replicas) -}}
{{- end -}}
{{- else if not (kindIs "invalid" .model.min_replicas) -}}
{{- fail (printf "models[%d].max_replicas: is missing, as min_replicas=%d bounds autoscaling; give one, such as %d" .number $least (add1 (max $replicas $least))) -}}
{{- end -}}
{{- end -}}

{{- define "squadron.checkBlocks" -}}
{{- $size := int (default 16 .model.block_size) -}}
{{- $power := 1 -}}
{{- range until 31 -}}
{{- if lt $power $size }}{{ $power = mul 2 $power }}{{ end -}}
{{- end -}}
{{- if ne $power $size -}}
{{- fail (printf "models[%d].block_size: must be a power of two such as 16, not %d" .number $size) -}}
{{- end -}}
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
{{- if eq .name $.model.group -}}
{{- $accelerated := not (empty (dig "accelerator" "resource" "" .)) -}}
{{- if and (hasPrefix "cuda" (toString $settings.device)) (not $accelerated) -}}
{{- fail (printf "models[%d].device: %s, but pods of workerGroups %q have no GPUs; give that accelerator.resource, such as nvidia.com/gpu" (int $.model.number) $settings.device .name) -}}
{{- end -}}
{{- if not (hasKey $settings "device") }}{{ $_ := set $settings "device" (ternary "cuda" "cpu" $accelerated) }}{{ end -}}
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
     larger one has a set of pods (numOfHosts) of its own. serving: pods at least that hold a replica's rank 0: Serve has
     a proxy there and nowhere else, and only a pod with a proxy becomes ready. */}}
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
{{- $leastRanks := 0 -}}
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
{{- $leastRanks = add $leastRanks (mul $from $size) -}}
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
{{- $tokenizers := list -}}
{{- range .models -}}
{{- $names = append $names .model.model -}}
{{- with .model.tokenizer }}{{ $tokenizers = append $tokenizers (printf "--tokenizer=%s" .) }}{{ end -}}
{{- end -}}
{{- $serving := min (ceil (divf $leastRanks (mul $ranks $hosts))) (mul $least $hosts) -}}
{{- $sized := dict "models" (uniq $names) "tokenizers" (uniq $tokenizers) "ranks" $ranks "hosts" $hosts "serving" $serving "replicas" $start "minReplicas" $least "maxReplicas" $most "cpu" $cpu "numCpus" $numCpus -}}
{{- range $key, $value := $sized }}{{ $_ := set $group $key $value }}{{ end -}}
{{- toJson $group -}}
{{- end -}}
