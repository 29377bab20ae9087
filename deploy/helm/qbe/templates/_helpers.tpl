{{- define "qbe.name" -}}
{{- $name := ternary .Release.Name (printf "%s-%s" .Release.Name .Chart.Name) (contains .Chart.Name .Release.Name) }}
{{- $name | trunc 52 | trimSuffix "-" }}
{{- end }}

{{- define "qbe.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "qbe.labels" -}}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version | replace "+" "_" }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{ include "qbe.selector" . }}
{{- end }}

{{- define "qbe.keys" -}}
{{- if not (or .Values.keys .Values.existingKeys) }}
{{- fail "a server that others reach needs keys: make one with 'qbe serve --new-key NAME' and give --set-file keys=keys.toml, or existingKeys" }}
{{- end }}
{{- if and .Values.keys .Values.existingKeys }}
{{- fail "give keys or existingKeys, not both" }}
{{- end }}
{{- .Values.existingKeys | default (printf "%s-keys" (include "qbe.name" .)) }}
{{- end }}
