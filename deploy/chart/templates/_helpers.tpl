{{- define "tierline.name" -}}
{{- if contains "tierline" .Release.Name }}{{ .Release.Name | trunc 63 | trimSuffix "-" }}{{ else }}{{ printf "%s-tierline" .Release.Name | trunc 63 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "tierline.selector" -}}
app.kubernetes.io/name: tierline
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "tierline.labels" -}}
{{ include "tierline.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{/* The config's own drain_timeout (30 s where it has none) may not be cut short. */}}
{{- define "tierline.drain" -}}
{{- $line := regexFind "(?m)^drain_timeout *= *[0-9]+" .Values.config -}}
{{- $asked := 30 -}}
{{- if $line }}{{ $asked = regexFind "[0-9]+$" $line | int }}{{ end -}}
{{- if gt $asked (.Values.drainSeconds | int) }}{{ fail (printf "drain_timeout is %d s, drainSeconds only %d" $asked (.Values.drainSeconds | int)) }}{{ end -}}
{{- end }}
