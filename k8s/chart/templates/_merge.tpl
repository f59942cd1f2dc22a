{{- /* Merges `patch` into the dictionary `into`, in place: null removes a field, and lists of facts.json's `named_by` are merged by
what names their entries. */}}
{{- define "slipstream.merge" }}
{{- range $field, $value := .patch }}
{{- $old := get $.into $field }}
{{- if kindIs "invalid" $value }}{{ $_ := unset $.into $field }}
{{- else if kindIs "map" $value }}
{{- if not (kindIs "map" $old) }}{{ $old = dict }}{{ $_ := set $.into $field $old }}{{ end }}
{{- include "slipstream.merge" (dict "into" $old "patch" $value "named_by" $.named_by) }}
{{- else if and (kindIs "slice" $value) (hasKey $.named_by $field) }}
{{- $merged := list }}
{{- $met := dict }}
{{- range $entry := $old | default list }}
{{- $name := include "slipstream.identity" (dict "entry" $entry "fields" (get $.named_by $field)) }}
{{- $keep := true }}
{{- range $value }}
{{- if eq $name (include "slipstream.identity" (dict "entry" . "fields" (get $.named_by $field))) }}
{{- /* A variable may stand in those behind it, so it moves behind those that are kept. */}}
{{- if or (hasKey . "$patch") (eq $field "env") }}{{ $keep = false }}
{{- else }}{{ $_ := set $met $name true }}{{ include "slipstream.merge" (dict "into" $entry "patch" . "named_by" $.named_by) }}
{{- end }}
{{- end }}
{{- end }}
{{- if $keep }}{{ $merged = append $merged $entry }}{{ end }}
{{- end }}
{{- range $value }}
{{- $name := include "slipstream.identity" (dict "entry" . "fields" (get $.named_by $field)) }}
{{- if not (or (hasKey . "$patch") (hasKey $met $name)) }}{{ $merged = append $merged . }}{{ end }}
{{- end }}
{{- $_ := set $.into $field $merged }}
{{- else }}{{ $_ := set $.into $field $value }}
{{- end }}
{{- end }}
{{- end }}

{{- define "slipstream.identity" }}
{{- $entry := .entry }}
{{- range .fields }}{{ get $entry . | toJson }} {{ end }}
{{- end }}
