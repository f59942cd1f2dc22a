{{- /* What `deployments` says of a Deployment, StatefulSet or Job, and what other values mean for it. */}}
{{- define "slipstream.workload" }}
{{- $root := .root }}
{{- $values := $root.Values }}
{{- $object := .object }}
{{- $name := $object.metadata.name }}
{{- $given := get $values.deployments $name | default dict }}
{{- $pod := $object.spec.template.spec }}
{{- $container := first $pod.containers }}
{{- $component := get ($object.metadata.labels | default dict) "app.kubernetes.io/component" | default "" }}
{{- $role := has $component (list "gateway" "verifier" "drafter") }}
{{- $merge := dict "named_by" .facts.named_by }}
{{- range concat ($pod.initContainers | default list) $pod.containers }}
{{- if or $role (eq $object.kind "Job") }}
{{- $_ := set . "image" (regexReplaceAll ":[^:/]*?(-cuda)?$" .image (printf ":%s${1}" ($values.image.tag | default $root.Chart.AppVersion))) }}
{{- if $values.image.pullPolicy }}{{ $_ := set . "imagePullPolicy" $values.image.pullPolicy }}{{ end }}
{{- end }}
{{- if $values.global.imageRegistry }}{{ $_ := set . "image" (printf "%s/%s" $values.global.imageRegistry .image) }}{{ end }}
{{- end }}
{{- /* A pool, or where else its pods may run. */}}
{{- with get ($object.metadata.labels | default dict) "slipstream/pool" }}
{{- if not (and $values.settings.pool_label (get $values.settings (printf "%s_pool" .))) }}
{{- if not (or (pick $given "nodeSelector" "affinity" "nodeName") (pick ($given.pod | default dict) "nodeSelector" "affinity" "nodeName")) }}
{{- fail (printf "settings.pool_label and settings.%s_pool: the label of your node pools and its value, or deployments.%s.nodeSelector; without them drafters would run on verifiers' GPUs. With one kind of GPU: kubernetes.io/os, linux, linux" . $name) }}
{{- end }}
{{- $_ := unset $pod "affinity" }}
{{- end }}
{{- end }}
{{- $env := list }}
{{- if and (eq $name "verifier") (or $values.vllm.tensorParallel $values.vllm.args $values.vllm.speculator) }}
{{- $there := dict }}
{{- range $container.env }}{{ if hasKey . "value" }}{{ $_ := set $there .name .value }}{{ end }}{{ end }}
{{- if ne (get $there "VERIFIER_ENGINE") "vllm" }}{{ fail "vllm: components.multi-gpu-verifier=true serves the target by vLLM" }}{{ end }}
{{- $gpus := $values.vllm.tensorParallel | default (get $container.resources.limits "nvidia.com/gpu") }}
{{- $env = append $env (dict "name" "VERIFIER_VLLM_ARGS" "value" (printf "--tensor-parallel-size %d %s" (int $gpus) $values.vllm.args | trim)) }}
{{- with $values.vllm.speculator }}{{ $env = append $env (dict "name" "VERIFIER_VLLM_SPECULATOR" "value" .) }}{{ end }}
{{- $_ := set $container.resources.limits "nvidia.com/gpu" (toString (int $gpus)) }}
{{- end }}
{{- $drain := ternary $values.drain dict (eq $name "gateway") }}
{{- if not (kindIs "invalid" $drain.streams_s) }}{{ $env = append $env (dict "name" "GATEWAY_GRACE_S" "value" (toString (int $drain.streams_s))) }}{{ end }}
{{- range $variable, $value := $given.env }}
{{- $text := toString $value }}
{{- if kindIs "float64" $value }}{{ if eq (floor $value) $value }}{{ $text = toString (int64 $value) }}{{ end }}{{ end }}
{{- $env = append $env (dict "name" $variable "value" $text) }}
{{- end }}
{{- $env = concat $env ($given.envFull | default list) }}
{{- /* Of entries of one name the last one counts. */}}
{{- $last := dict }}
{{- range $env }}{{ $_ := set $last .name . }}{{ end }}
{{- $distinct := list }}
{{- range $env }}{{ if eq (toJson .) (get $last .name | toJson) }}{{ $distinct = append $distinct . }}{{ end }}{{ end }}
{{- if $distinct }}{{ include "slipstream.merge" (merge (dict "into" $container "patch" (dict "env" $distinct)) $merge) }}{{ end }}
{{- if $drain.balancers_s }}{{ $_ := set $container "lifecycle" (dict "preStop" (dict "sleep" (dict "seconds" (int $drain.balancers_s)))) }}{{ end }}
{{- $ofContainer := pick $given "image" "imagePullPolicy" "resources" "envFrom" "command" "args" "lifecycle" "startupProbe" "readinessProbe" "livenessProbe" "securityContext" "volumeMounts" }}
{{- include "slipstream.merge" (merge (dict "into" $container "patch" $ofContainer) $merge) }}
{{- include "slipstream.merge" (merge (dict "into" $container "patch" ($given.container | default dict)) $merge) }}
{{- $ofPod := pick $given "nodeSelector" "affinity" "tolerations" "topologySpreadConstraints" "imagePullSecrets" "runtimeClassName" "nodeName" "priorityClassName" "terminationGracePeriodSeconds" "schedulerName" "hostNetwork" "volumes" "initContainers" }}
{{- with $given.podSecurityContext }}{{ $_ := set $ofPod "securityContext" . }}{{ end }}
{{- with $given.extraContainers }}{{ $_ := set $ofPod "containers" . }}{{ end }}
{{- include "slipstream.merge" (merge (dict "into" $pod "patch" $ofPod) $merge) }}
{{- include "slipstream.merge" (merge (dict "into" $pod "patch" ($given.pod | default dict)) $merge) }}
{{- include "slipstream.merge" (merge (dict "into" $object.spec "patch" (pick $given "replicas" "strategy")) $merge) }}
{{- if eq (dig "strategy" "type" "" $object.spec) "Recreate" }}{{ $_ := unset $object.spec.strategy "rollingUpdate" }}{{ end }}
{{- include "slipstream.merge" (merge (dict "into" $object.metadata "patch" (pick $given "labels" "annotations")) $merge) }}
{{- $ofTemplate := dict }}
{{- with $given.podLabels }}{{ $_ := set $ofTemplate "labels" . }}{{ end }}
{{- with $given.podAnnotations }}{{ $_ := set $ofTemplate "annotations" . }}{{ end }}
{{- include "slipstream.merge" (merge (dict "into" $object.spec.template "patch" (dict "metadata" $ofTemplate)) $merge) }}
{{- with $given.serviceAccount }}
{{- $key := printf "ServiceAccount/%s" $pod.serviceAccountName }}
{{- if .name }}{{ $_ := unset $.objects $key }}{{ $_ := set $pod "serviceAccountName" .name }}
{{- else }}{{ include "slipstream.merge" (merge (dict "into" (get $.objects $key).metadata "patch" (pick . "labels" "annotations")) $merge) }}
{{- end }}
{{- end }}
{{- include "slipstream.elsewhere" . }}
{{- if get $values.components "openshift" }}
{{- range list "runAsUser" "runAsGroup" "fsGroup" }}{{ if not (hasKey ($given.podSecurityContext | default dict) .) }}{{ $_ := unset $pod.securityContext . }}{{ end }}{{ end }}
{{- end }}
{{- /* Drafters that are there. */}}
{{- range $container.env }}
{{- if has .name (list "GATEWAY_DRAFTERS" "GATEWAY_DRAFTER_PRICES") }}
{{- $entries := list }}
{{- range $entry := splitList "," .value }}
{{- if get $values.drafters (first (splitList "=" $entry)) | toString | ne "false" }}{{ $entries = append $entries $entry }}{{ end }}
{{- end }}
{{- $_ := set . "value" (join "," $entries) }}
{{- end }}
{{- end }}
{{- /* What the end of a role takes at most, with the settings' defaults, and 10 s for what follows; never less than the overlay has. */}}
{{- if $role }}
{{- $read := dict "GATEWAY_GRACE_S" "20" "GATEWAY_STORE_GRACE_S" "5" "VERIFIER_GRACE_S" "5" "DRAFTER_GRACE_S" "5" }}
{{- range $container.env }}{{ if hasKey . "value" }}{{ $_ := set $read .name .value }}{{ end }}{{ end }}
{{- $end := add 10 (ceil (float64 (get $read (printf "%s_GRACE_S" (upper $component)))) | int) (dig "lifecycle" "preStop" "sleep" "seconds" 0 $container | int) }}
{{- if eq $component "gateway" }}{{ $end = add $end (mul 2 (ceil (float64 $read.GATEWAY_STORE_GRACE_S) | int)) }}{{ end }}
{{- if or (hasKey $given "terminationGracePeriodSeconds") (hasKey ($given.pod | default dict) "terminationGracePeriodSeconds") }}
{{- if lt (int $pod.terminationGracePeriodSeconds) (int $end) }}{{ fail (printf "deployments.%s.terminationGracePeriodSeconds: its pods need %d s to end; shorten %s_GRACE_S or preStop with it" $name (int $end) (upper $component)) }}{{ end }}
{{- else }}{{ $_ := set $pod "terminationGracePeriodSeconds" (max $end $pod.terminationGracePeriodSeconds) }}
{{- end }}
{{- end }}
{{- end }}

{{- /* Secrets, claims and storage classes that are there already instead of those that the overlay names. */}}
{{- define "slipstream.elsewhere" }}
{{- $values := .root.Values }}
{{- $read := .read }}
{{- $spec := .object.spec }}
{{- $pod := $spec.template.spec }}
{{- range concat ($pod.initContainers | default list) $pod.containers }}
{{- range .env }}
{{- $reference := dig "valueFrom" "secretKeyRef" dict . }}
{{- with get $values.secrets ($reference.name | default "") }}
{{- $_ := set $read $reference.name true }}
{{- if .key }}{{ $_ := set $reference "key" .key }}{{ end }}
{{- if .existingSecret }}{{ $_ := set $reference "name" .existingSecret }}{{ end }}
{{- end }}
{{- end }}
{{- end }}
{{- range $volume := $pod.volumes }}
{{- with $volume.secret }}
{{- $secret := . }}
{{- with get $values.secrets $secret.secretName }}
{{- $_ := set $read $secret.secretName true }}
{{- if .key }}{{ $_ := set $secret "items" (list (dict "key" .key "path" "api-keys")) }}{{ end }}
{{- if .existingSecret }}{{ $_ := set $secret "secretName" .existingSecret }}{{ end }}
{{- end }}
{{- end }}
{{- with $volume.ephemeral }}{{ if $values.storageClass }}{{ $_ := set .volumeClaimTemplate.spec "storageClassName" $values.storageClass }}{{ end }}{{ end }}
{{- if and (eq $volume.name "models") $volume.persistentVolumeClaim $values.existingClaims.models }}
{{- $_ := set $volume.persistentVolumeClaim "claimName" $values.existingClaims.models }}{{ $_ := set $read "claim models" true }}
{{- end }}
{{- if and (eq $volume.name "caches") $values.existingClaims.caches }}
{{- $_ := unset $volume "emptyDir" }}{{ $_ := set $volume "persistentVolumeClaim" (dict "claimName" $values.existingClaims.caches) }}{{ $_ := set $read "claim caches" true }}
{{- end }}
{{- end }}
{{- range $claim := $spec.volumeClaimTemplates }}
{{- if $values.storageClass }}{{ $_ := set $claim.spec "storageClassName" $values.storageClass }}{{ end }}
{{- if $values.existingClaims.redis }}
{{- $_ := set $read "claim redis" true }}
{{- $_ := set $pod "volumes" (append ($pod.volumes | default list) (dict "name" $claim.metadata.name "persistentVolumeClaim" (dict "claimName" $values.existingClaims.redis))) }}
{{- $_ := unset $spec "volumeClaimTemplates" }}
{{- end }}
{{- end }}
{{- end }}
