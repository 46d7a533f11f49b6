{{- define "radixlm.name" -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{- define "radixlm.selector" -}}
app.kubernetes.io/name: radixlm
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "radixlm.labels" -}}
{{ include "radixlm.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- /* "true" if any workers are prefill or decode workers */ -}}
{{- define "radixlm.isDisaggregated" -}}
{{- range .Values.workers }}{{ if ne .type "regular" }}true{{ end }}{{ end -}}
{{- end }}

{{- /* the labels that a --selector of the gateway wants; a dict of root and type */ -}}
{{- define "radixlm.pods" -}}
- app.kubernetes.io/instance={{ .root.Release.Name }}
- app.kubernetes.io/component=worker
- radixlm.ai/type={{ .type }}
{{- end }}

{{- define "radixlm.placement" -}}
{{- with .nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "radixlm.apiKey" -}}
- name: RADIXLM_API_KEY
  valueFrom:
    secretKeyRef: {name: {{ .Values.gateway.apiKeySecret }}, key: api-key}
{{- end }}
