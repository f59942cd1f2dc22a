{{- /* Priority classes that the cluster has already. */}}
{{- define "slipstream.classes" }}
{{- range $which := list "serving" "drafting" }}
{{- $class := get $.root.Values.settings (printf "%s_class" $which) }}
{{- if $class }}
{{- $_ := unset $.objects (printf "PriorityClass/slipstream-%s.%s" $which $.root.Release.Namespace) }}
{{- range $object := $.objects }}
{{- $component := get ($object.metadata.labels | default dict) "app.kubernetes.io/component" }}
{{- if and (has $object.kind (list "Deployment" "StatefulSet")) (has $component (ternary (list "gateway" "verifier" "store") (list "drafter") (eq $which "serving"))) }}
{{- $_ := set $object.metadata.labels "slipstream/priority" (printf "%s-elsewhere" $which) }}
{{- $_ := set $object.spec.template.spec "priorityClassName" $class }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- /* How many pods there are: `autoscaling`, where there is a ScaledObject. */}}
{{- define "slipstream.scaling" }}
{{- $values := .root.Values }}
{{- range $name, $given := $values.autoscaling }}
{{- $scaled := get $.objects (printf "ScaledObject/%s" $name) }}
{{- if not $scaled }}{{ fail (printf "autoscaling.%s: components.autoscaling=true adds a ScaledObject to gateway, verifier and drafter-model" $name) }}{{ end }}
{{- $spec := $scaled.spec }}
{{- range $value, $field := dict "minReplicas" "minReplicaCount" "maxReplicas" "maxReplicaCount" "pollingInterval" "pollingInterval" "cooldownPeriod" "cooldownPeriod" }}
{{- if hasKey $given $value }}{{ $_ := set $spec $field (get $given $value | int) }}{{ end }}
{{- end }}
{{- if hasKey $given "fallbackReplicas" }}{{ $_ := set $spec.fallback "replicas" (int $given.fallbackReplicas) }}{{ end }}
{{- if gt (int $spec.minReplicaCount) (int $spec.maxReplicaCount) }}{{ fail (printf "autoscaling.%s: at least %d and at most %d replicas" $name (int $spec.minReplicaCount) (int $spec.maxReplicaCount)) }}{{ end }}
{{- range $trigger, $threshold := $given.thresholds }}
{{- $found := false }}
{{- range $spec.triggers }}{{ if eq .name $trigger }}{{ $found = true }}{{ $_ := set .metadata "threshold" (toString $threshold) }}{{ end }}{{ end }}
{{- if not $found }}{{ fail (printf "autoscaling.%s.thresholds.%s: it has no such trigger" $name $trigger) }}{{ end }}
{{- end }}
{{- end }}
{{- range $key, $object := .objects }}
{{- if eq $object.kind "ScaledObject" }}
{{- if hasKey (get $values.deployments $object.metadata.name | default dict) "replicas" }}{{ fail (printf "deployments.%s.replicas: autoscaling decides it" $object.metadata.name) }}{{ end }}
{{- with get $.objects (printf "Deployment/%s" $object.metadata.name) }}{{ $_ := unset .spec "replicas" }}{{ end }}
{{- end }}
{{- end }}
{{- end }}

{{- /* The ways in: the Service `clients`, an Ingress, routes of the Gateway API. */}}
{{- define "slipstream.ways" }}
{{- $values := .root.Values }}
{{- if $values.service }}
{{- $service := get .objects "Service/clients" }}
{{- if not $service }}{{ fail "service: components.clients=false leaves it out" }}{{ end }}
{{- include "slipstream.merge" (dict "into" $service.metadata "patch" (pick $values.service "annotations" "labels") "named_by" dict) }}
{{- include "slipstream.merge" (dict "into" $service.spec "patch" (omit $values.service "annotations" "labels" "ports") "named_by" dict) }}
{{- /* Of a balancer alone. */}}
{{- if eq $service.spec.type "ClusterIP" }}{{ $_ := unset $service.spec "externalTrafficPolicy" }}{{ end }}
{{- range $service.spec.ports }}{{ if hasKey ($values.service.ports | default dict) .name }}{{ $_ := set . "port" (get $values.service.ports .name | int) }}{{ end }}{{ end }}
{{- end }}
{{- range $object := .objects }}
{{- if eq $object.kind "Ingress" }}
{{- $_ := set $object.spec "ingressClassName" $values.ingress.className }}
{{- include "slipstream.merge" (dict "into" $object.metadata "patch" (dict "annotations" $values.ingress.annotations) "named_by" dict) }}
{{- if $values.ingress.tlsSecret }}{{ range $object.spec.tls }}{{ $_ := set . "secretName" $values.ingress.tlsSecret }}{{ end }}{{ end }}
{{- /* Gateways that speak TLS themselves. */}}
{{- if and (hasKey $.objects "Certificate/gateway-clients") (eq $values.ingress.className "nginx") }}
{{- $protocol := get $object.metadata.annotations "nginx.ingress.kubernetes.io/backend-protocol" }}
{{- $_ := set $object.metadata.annotations "nginx.ingress.kubernetes.io/backend-protocol" (printf "%sS" (trimSuffix "S" $protocol)) }}
{{- end }}
{{- end }}
{{- $route := ternary $values.httpRoute $values.grpcRoute (eq $object.kind "HTTPRoute") }}
{{- if and (has $object.kind (list "HTTPRoute" "GRPCRoute")) (hasPrefix "clients" $object.metadata.name) }}
{{- with $route.parentRefs }}{{ $_ := set $object.spec "parentRefs" . }}{{ end }}
{{- with $route.annotations }}{{ $_ := set $object.metadata "annotations" . }}{{ end }}
{{- end }}
{{- end }}
{{- end }}
