{{- /* A file of kustomize's objects, with values where it has their places: <<NAME>>. */}}
{{- define "slipstream.text" }}
{{- $text := .root.Files.Get (printf "%s.yaml" .file) }}
{{- range $name, $value := merge (dict "namespace" .root.Release.Namespace) .settings .root.Values.models }}
{{- $text = replace (printf "<<%s>>" $name) $value $text }}
{{- end }}
{{- /* Pods start again when their models change: kustomize renames the ConfigMap for that, and so does this. */}}
{{- replace "<<models>>" (toJson .root.Values.models | sha256sum | trunc 10) $text }}
{{- end }}

{{- /* Fills `objects`, by KIND/NAME: those of the overlay, then what components add, remove and change. */}}
{{- define "slipstream.objects" }}
{{- $root := .root }}
{{- $objects := .objects }}
{{- $facts := .facts }}
{{- $wanted := $root.Values.components }}
{{- $listed := get $facts.overlays $root.Values.overlay }}
{{- $on := list }}
{{- $off := list }}
{{- range $facts.switched }}
{{- $given := get $wanted . }}
{{- if and (eq . "clients") $root.Values.service (not (kindIs "bool" $given)) }}{{ $given = true }}{{ end }}
{{- if kindIs "bool" $given }}
{{- if and $given (not (has . $listed)) }}{{ $on = append $on . }}{{ end }}
{{- if and (not $given) (has . $listed) }}{{ $off = append $off . }}{{ end }}
{{- end }}
{{- end }}
{{- range $group := $facts.one_of }}
{{- $chosen := list }}
{{- range $group }}{{ if or (has . $on) (and (has . $listed) (kindIs "bool" (get $wanted .)) (get $wanted .)) }}{{ $chosen = append $chosen . }}{{ end }}{{ end }}
{{- if gt (len $chosen) 1 }}{{ fail (printf "components: %s exclude each other" (join " and " $chosen)) }}{{ end }}
{{- range $group }}{{ if and $chosen (has . $listed) (not (has . $chosen)) (not (has . $off)) }}{{ $off = append $off . }}{{ end }}{{ end }}
{{- end }}
{{- $there := concat $listed $on }}
{{- range $component, $needed := $facts.needs }}
{{- if and (has $component $on) (or (not (has $needed $there)) (has $needed $off)) }}{{ fail (printf "components.%s stands on %s, which the overlay %s has not%s" $component $needed $root.Values.overlay (ternary (printf ": components.%s=true" $needed) "" (has $needed $facts.switched))) }}{{ end }}
{{- end }}
{{- if and (has "autoscaling" $there) (not (has "autoscaling" $off)) (or (not (has "monitoring" $there)) (has "monitoring" $off)) }}
{{- fail "components.autoscaling needs components.monitoring=true: KEDA scales by what Prometheus scrapes" }}
{{- end }}
{{- $settings := deepCopy $root.Values.settings }}
{{- $defaults := $root.Files.Get "settings.yaml" | fromYaml }}
{{- range $name, $value := mergeOverwrite $defaults.base (ternary (get $defaults "multi-gpu-verifier") dict (has "multi-gpu-verifier" $on)) }}
{{- if and (hasSuffix "_storage" $name) (not (get $settings $name)) }}{{ $_ := set $settings $name $value }}{{ end }}
{{- end }}
{{- $_ := set . "settings" $settings }}
{{- range splitList "\n---\n" (include "slipstream.text" (dict "root" $root "settings" $settings "file" (printf "objects/%s" $root.Values.overlay))) }}
{{- $object := fromYaml . }}
{{- $_ := set $objects (include "slipstream.key" $object) $object }}
{{- end }}
{{- range list (dict "way" "off" "components" $off) (dict "way" "on" "components" $on) }}
{{- $way := .way }}
{{- range .components }}
{{- $change := get (include "slipstream.text" (dict "root" $root "settings" $settings "file" (printf "components/%s" .)) | fromYaml) $way }}
{{- range $change.removed }}{{ $_ := unset $objects . }}{{ end }}
{{- range $change.added }}{{ $key := include "slipstream.key" . }}{{ if not (hasKey $objects $key) }}{{ $_ := set $objects $key . }}{{ end }}{{ end }}
{{- range $key, $patch := $change.changed }}
{{- if hasKey $objects $key }}{{ include "slipstream.merge" (dict "into" (get $objects $key) "patch" $patch "named_by" $facts.named_by) }}{{ end }}
{{- end }}
{{- end }}
{{- end }}
{{- range $file, $kinds := dict "inference-pool" (ternary (list "InferencePool" "HTTPRoute" "NetworkPolicy") list (get $wanted "inference-pool" | default false)) "ingress" (ternary (list "Ingress") list $root.Values.ingress.enabled) "routes" (concat (ternary (list "HTTPRoute") list $root.Values.httpRoute.enabled) (ternary (list "GRPCRoute") list $root.Values.grpcRoute.enabled) (ternary (list "BackendTLSPolicy") list (and (or $root.Values.httpRoute.enabled $root.Values.grpcRoute.enabled) (hasKey $objects "Certificate/gateway-clients")))) }}
{{- if $kinds }}
{{- range splitList "\n---\n" (include "slipstream.text" (dict "root" $root "settings" $settings "file" (printf "components/%s" $file))) }}
{{- $object := fromYaml . }}
{{- if has $object.kind $kinds }}{{ $_ := set $objects (include "slipstream.key" $object) $object }}{{ end }}
{{- end }}
{{- end }}
{{- end }}
{{- range $name, $kept := $root.Values.drafters }}
{{- if not $kept }}
{{- range keys $objects }}{{ if hasSuffix (printf "/drafter-%s" $name) . }}{{ $_ := unset $objects . }}{{ end }}{{ end }}
{{- end }}
{{- end }}
{{- $policed := hasKey $objects "NetworkPolicy/default-deny" }}
{{- range keys $objects }}
{{- /* One policy by itself would cut off all that it does not name. */}}
{{- if and (hasPrefix "NetworkPolicy/" .) (not $policed) }}{{ $_ := unset $objects . }}{{ end }}
{{- end }}
{{- end }}

{{- define "slipstream.key" }}{{ .kind }}/{{ regexReplaceAll "^models-[0-9a-f]{10}$" .metadata.name "models" }}{{ end }}
