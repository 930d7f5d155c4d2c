{{/* All worker groups in their order, with what their user left open, as JSON: {"groups": [...]}. */}}
{{- define "squadron.allGroups" -}}
{{- $groups := list -}}
{{- $names := list -}}
{{- range $number, $given := .Values.workerGroups -}}
{{- $group := $.Files.Get "defaults/worker-group.yaml" | fromYaml -}}
{{- range $key, $value := $given }}{{ $_ := set $group $key $value }}{{ end -}}
{{- if not $group.name -}}
{{- if $number }}{{ fail (printf "workerGroups[%d].name: is missing, which only the first group may; give one such as workers-%d" $number $number) }}{{ end -}}
{{- $_ := set $group "name" "workers" -}}
{{- end -}}
{{- if has $group.name $names -}}
{{- fail (printf "workerGroups[%d].name: %q is the name of another group; give it another, such as %s-%d" $number $group.name $group.name $number) -}}
{{- end -}}
{{- $names = append $names $group.name -}}
{{- include "squadron.checkDevices" (dict "number" $number "group" $group) -}}
{{- $groups = append $groups $group -}}
{{- end -}}
{{- dict "groups" $groups | toJson -}}
{{- end -}}

{{/* Refuses what would contradict the chart's own resources and variables. number; group. */}}
{{- define "squadron.checkDevices" -}}
{{- $group := .group -}}
{{- $claims := list -}}
{{- range $group.resourceClaims }}{{ $claims = append $claims .name }}{{ end -}}
{{- with $group.accelerator.claim -}}
{{- if $group.accelerator.resource -}}
{{- fail (printf "workerGroups[%d].accelerator.claim: ranks take %s already; give resource or claim" $.number $group.accelerator.resource) -}}
{{- end -}}
{{- if not (has . $claims) -}}
{{- fail (printf "workerGroups[%d].accelerator.claim: %q is none of resourceClaims; add one such as {name: %s, resourceClaimTemplateName: %s}" $.number . . .) -}}
{{- end -}}
{{- end -}}
{{- range $name, $_ := $group.resources -}}
{{- if has $name (list "cpu" "memory" "ephemeral-storage" $group.accelerator.resource) -}}
{{- fail (printf "workerGroups[%d].resources: %s is asked for already; set cpu, memory, disk.request or ranksPerPod, and give others here, such as rdma/hca: 1" $.number $name) -}}
{{- end -}}
{{- end -}}
{{- range $name, $_ := $group.nccl -}}
{{- if not (hasPrefix "NCCL_" $name) -}}
{{- fail (printf "workerGroups[%d].nccl: %s is no setting of NCCL, such as NCCL_SOCKET_IFNAME; put it into env" $.number $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The models with their places in the list, as JSON: {"models": [{"number": 0, "model": {...}, "group": "workers"}]} */}}
{{- define "squadron.models" -}}
{{- $names := list -}}
{{- range (include "squadron.allGroups" . | fromJson).groups }}{{ $names = append $names .name }}{{ end -}}
{{- with .Values.routers.workerGroup -}}
{{- if not (has . $names) -}}
{{- fail (printf "routers.workerGroup: there is no worker group %q; known: %s" . (join ", " $names)) -}}
{{- end -}}
{{- end -}}
{{- $models := list -}}
{{- $owners := dict -}}
{{- range $number, $model := .Values.models -}}
{{- $group := default (first $names) $model.workerGroup -}}
{{- if not (has $group $names) -}}
{{- fail (printf "models[%d].workerGroup: there is no worker group %q; known: %s" $number $group (join ", " $names)) -}}
{{- end -}}
{{- if eq $group $.Values.routers.workerGroup -}}
{{- fail (printf "routers.workerGroup: models[%d] runs in %q; give routers a group of their own, and models[%d].workerGroup another" $number $group $number) -}}
{{- end -}}
{{- include "squadron.checkReplicas" (dict "number" $number "model" $model) -}}
{{- include "squadron.checkBlocks" (dict "number" $number "model" $model) -}}
{{- include "squadron.checkEngine" (dict "number" $number "model" $model) -}}
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

{{/* The least replicas of a model whose number follows the load. */}}
{{- define "squadron.leastReplicas" -}}
{{- ternary 1 (int .min_replicas) (kindIs "invalid" .min_replicas) -}}
{{- end -}}

{{/* The replicas that a model begins with. */}}
{{- define "squadron.replicas" -}}
{{- $fewest := 1 -}}
{{- if .max_replicas }}{{ $fewest = include "squadron.leastReplicas" . | int | max 1 }}{{ end -}}
{{- int (default $fewest .replicas) -}}
{{- end -}}

{{/* Refuses what the app would refuse when its pods have been paid for already. number; model. */}}
{{- define "squadron.checkReplicas" -}}
{{- $replicas := include "squadron.replicas" .model | int -}}
{{- $least := include "squadron.leastReplicas" .model | int -}}
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

{{- define "squadron.checkEngine" -}}
{{- if and .model.enable_expert_parallel (eq 1 (int (default 1 .model.tensor_parallel_size))) -}}
{{- fail (printf "models[%d].enable_expert_parallel: spreads experts over ranks, and there is one; give tensor_parallel_size=2 or more, or leave it out" .number) -}}
{{- end -}}
{{- range $name := list "hf_overrides" "override_generation_config" -}}
{{- with get $.model $name -}}
{{- if kindIs "string" . -}}
{{- with (fromJson .).Error }}{{ fail (printf "models[%d].%s: is no JSON (%s); give an object such as %s" $.number $name . "{\"temperature\": 0.7}") }}{{ end -}}
{{- end -}}
{{- end -}}
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
{{- range (include "squadron.allGroups" .root | fromJson).groups -}}
{{- if eq .name $.model.group -}}
{{- $accelerated := not (empty (include "squadron.accelerated" .)) -}}
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
{{- $apart := $root.Values.routers.workerGroup -}}
{{- range $number, $group := (include "squadron.allGroups" $root | fromJson).groups -}}
{{- $models := list -}}
{{- range $.models }}{{ if eq .group $group.name }}{{ $models = append $models . }}{{ end }}{{ end -}}
{{- if $models -}}
{{- $keep := and (eq $number 0) (not $apart) -}}
{{- $groups = append $groups (include "squadron.sizedGroup" (dict "root" $root "group" $group "number" $number "models" $models "keep" $keep) | fromJson) -}}
{{- else if $.lone -}}
{{- else if eq $group.name $apart -}}
{{- $groups = append $groups (include "squadron.routerGroup" (dict "root" $root "group" $group "number" $number) | fromJson) -}}
{{- else if eq "0" (toString $group.replicas) -}}
{{- include "squadron.checkEmpty" (dict "group" $group "number" $number) -}}
{{- $groups = append $groups (include "squadron.sizedGroup" (dict "root" $root "group" $group "number" $number "models" list "keep" false) | fromJson) -}}
{{- else -}}
{{- fail (printf "workerGroups[%d].name: no model runs in %q; name it in models[].workerGroup or routers.workerGroup, keep it empty with workerGroups[%d].replicas=0, or leave the group out, for which KubeRay builds another cluster" $number $group.name $number) -}}
{{- end -}}
{{- end -}}
{{- dict "groups" $groups | toJson -}}
{{- end -}}

{{/* Refuses a group without models whose pods would have another size than before, or would start. number; group. */}}
{{- define "squadron.checkEmpty" -}}
{{- $group := .group -}}
{{- range $name := list "minReplicas" "maxReplicas" -}}
{{- if int (get $group $name) }}{{ fail (printf "workerGroups[%d].%s: no model runs in %q, and replicas=0 keeps it empty; leave %s out" $.number $name $group.name $name) }}{{ end -}}
{{- end -}}
{{- if and (include "squadron.accelerated" $group) (kindIs "invalid" $group.ranksPerPod) -}}
{{- fail (printf "workerGroups[%d].ranksPerPod: is missing, as no model of %q tells how large its pods are; give what they had, such as 1" .number $group.name) -}}
{{- end -}}
{{- end -}}

{{/* One group with the numbers of its pods, as JSON. A replica that fits into a pod shares it with others of its model; a
     larger one has a set of pods (numOfHosts) of its own. Their size follows the models' ranks and not how many routers
     or replicas there are: KubeRay builds another cluster for other pods, and not for more of them.
     serving: pods at least that hold a replica's rank 0: Serve has a proxy there and nowhere else, and only a pod with a
     proxy becomes ready. keep: whether one pod stays for routers. Without models there are no pods, and the cluster goes on
     with their template. */}}
{{- define "squadron.sizedGroup" -}}
{{- $group := .group -}}
{{- $largest := 1 -}}
{{- $cpus := ternary 0.0 1.0 (not (empty .models)) -}}
{{- range .models -}}
{{- $largest = max $largest (int (default 1 .model.tensor_parallel_size)) -}}
{{- $cpus = maxf $cpus (float64 (dig "cpus_per_worker" 1.0 .model)) -}}
{{- end -}}
{{- $ranks := int (default $largest $group.ranksPerPod) -}}
{{- $hosts := 0 -}}
{{- $leastRanks := 0 -}}
{{- $start := 0 -}}{{- $least := 0 -}}{{- $most := 0 -}}
{{- $scaled := -1 -}}
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
{{- $replicas := include "squadron.replicas" .model | int -}}
{{- $upTo := int (default $replicas .model.max_replicas) -}}
{{- if and .model.max_replicas (lt $scaled 0) }}{{ $scaled = int .number }}{{ end -}}
{{- $from := $replicas -}}
{{- if .model.max_replicas -}}
{{- $from = include "squadron.leastReplicas" .model | int -}}
{{- end -}}
{{- $start = add $start (ceil (divf $replicas $perPod)) -}}
{{- $least = add $least (ceil (divf $from $perPod)) -}}
{{- $leastRanks = add $leastRanks (mul $from $size) -}}
{{- $most = add $most (ceil (divf $upTo $perPod)) -}}
{{- end -}}
{{- $hosts = max 1 $hosts -}}
{{- if and (ge $scaled 0) (not .root.Values.autoscaling.enabled) (kindIs "invalid" $group.replicas) -}}
{{- fail (printf "models[%d].max_replicas: pods neither come nor go without autoscaling.enabled=true; set that, or workerGroups[%d].replicas=%d for pods that are always there" $scaled (int .number) (int $most)) -}}
{{- end -}}
{{- $needed := int $start -}}
{{- if not (kindIs "invalid" $group.replicas) }}{{ $start = $group.replicas }}{{ end -}}
{{- if .root.Values.autoscaling.enabled -}}
{{- if and (not (kindIs "invalid" $group.minReplicas)) (not (kindIs "invalid" $group.maxReplicas)) -}}
{{- if gt (int $group.minReplicas) (int $group.maxReplicas) -}}
{{- fail (printf "workerGroups[%d].minReplicas: %d is more than maxReplicas=%d; give at most that" (int .number) (int $group.minReplicas) (int $group.maxReplicas)) -}}
{{- end -}}
{{- end -}}
{{- if .keep }}{{ $least = max 1 $least }}{{ end -}}
{{- if not (kindIs "invalid" $group.minReplicas) }}{{ $least = $group.minReplicas }}{{ end -}}
{{- if not (kindIs "invalid" $group.maxReplicas) }}{{ $most = $group.maxReplicas }}{{ end -}}
{{- $start = max $start $least -}}
{{- if gt (int $start) (int $most) -}}
{{- fail (printf "workerGroups %q: maxReplicas is %d, but its models begin with %d; raise maxReplicas" $group.name (int $most) (int $start)) -}}
{{- end -}}
{{- else -}}
{{- range $name := list "minReplicas" "maxReplicas" -}}
{{- if not (kindIs "invalid" (get $group $name)) -}}
{{- fail (printf "workerGroups[%d].%s: pods neither come nor go without autoscaling.enabled=true; set that, or leave it out for replicas" (int $.number) $name) -}}
{{- end -}}
{{- end -}}
{{- if lt (int $start) $needed -}}
{{- fail (printf "workerGroups[%d].replicas: %d have no room for all replicas of the models in %q, some of which would wait for ever; give at least %d, or leave it out" (int .number) (int $start) $group.name $needed) -}}
{{- end -}}
{{- $least = $start }}{{ $most = $start -}}
{{- end -}}
{{- $cpu := default (addf (mulf $ranks $cpus) 1 | toString) (toString (default "" $group.cpu)) -}}
{{- $numCpus := include "squadron.numCpus" $cpu | int -}}
{{- $names := list -}}
{{- $tokenizers := list -}}
{{- range .models -}}
{{- $name := .model.model -}}
{{- with .model.revision }}{{ $name = printf "%s@%s" $name . }}{{ end -}}
{{- $names = append $names $name -}}
{{- with .model.tokenizer }}{{ $tokenizers = append $tokenizers . }}{{ end -}}
{{- end -}}
{{- $serving := min (ceil (divf $leastRanks (mul $ranks $hosts))) (mul $least $hosts) -}}
{{- $sized := dict "models" (uniq $names) "tokenizers" (uniq $tokenizers) "ranks" $ranks "hosts" $hosts "serving" $serving "replicas" $start "minReplicas" $least "maxReplicas" $most "cpu" $cpu "numCpus" $numCpus "rankCpus" (mulf $ranks $cpus) -}}
{{- range $key, $value := $sized }}{{ $_ := set $group $key $value }}{{ end -}}
{{- toJson $group -}}
{{- end -}}

{{/* The group of the routers alone, as JSON: where nothing is said, a pod for each. root; group; number. */}}
{{- define "squadron.routerGroup" -}}
{{- $group := .group -}}
{{- if include "squadron.accelerated" $group -}}
{{- fail (printf "workerGroups[%d].accelerator: routers use none, and %q is theirs (routers.workerGroup); leave it out" (int .number) $group.name) -}}
{{- end -}}
{{- $routers := int (default 1 .root.Values.app.routers) -}}
{{- $cpu := default "2" (toString (default "" $group.cpu)) -}}
{{- $pods := $routers -}}
{{- if not (kindIs "invalid" $group.replicas) }}{{ $pods = int $group.replicas }}{{ end -}}
{{- $sized := dict "models" list "tokenizers" list "ranks" 0 "hosts" 1 "serving" (min $pods $routers) "replicas" $pods "minReplicas" $pods "maxReplicas" $pods "cpu" $cpu "numCpus" (include "squadron.numCpus" $cpu | int) "rankCpus" 0 "routers" true -}}
{{- range $key, $value := $sized }}{{ $_ := set $group $key $value }}{{ end -}}
{{- toJson $group -}}
{{- end -}}

{{/* CPUs that Ray is told of: whole ones. */}}
{{- define "squadron.numCpus" -}}
{{ ternary (divf (trimSuffix "m" . | float64) 1000) (float64 (trimSuffix "m" .)) (hasSuffix "m" .) | ceil | int }}
{{- end -}}

{{/* Refuses more routers than the pods have CPUs for, which would wait for ever. root; groups: of squadron.groups. */}}
{{- define "squadron.checkRouters" -}}
{{- $known := .root.Files.Get "defaults/app.yaml" | fromYaml -}}
{{- $routers := int (default 1 .root.Values.app.routers) -}}
{{- $needed := mulf $routers $known.router_cpus -}}
{{- if .root.Values.app.batch_dir }}{{ $needed = addf $needed $known.batches_cpus }}{{ end -}}
{{- $apart := .root.Values.routers.workerGroup -}}
{{- $room := 0.0 -}}
{{- range .groups -}}
{{- if or (not $apart) .routers -}}
{{- $each := mulf (floor (divf (subf .numCpus .rankCpus) $known.router_cpus)) $known.router_cpus -}}
{{- $room = addf $room (mulf .replicas .hosts (maxf 0.0 $each)) -}}
{{- end -}}
{{- end -}}
{{- if gt $needed $room -}}
{{- $first := index .groups 0 -}}
{{- range .groups }}{{ if .routers }}{{ $first = . }}{{ end }}{{ end -}}
{{- $more := divf (subf $needed $room) (max 1 (int (mulf $first.replicas $first.hosts))) | ceil -}}
{{- fail (printf "app.routers: %d take %v CPUs with what runs beside them, and pods have %v to spare; give fewer, or pods of workerGroups %q more with cpu=%v" $routers $needed $room $first.name (addf $first.numCpus $more)) -}}
{{- end -}}
{{- end -}}
