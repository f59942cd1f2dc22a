"""Values that people set in other charts for language models, each with its place in ours and where it is seen."""

from __future__ import annotations

from typing import NamedTuple


class Value(NamedTuple):
    known_as: str
    """In vLLM's production-stack (`servingEngineSpec`, `routerSpec`), llm-d's modelservice (`decode`) or elsewhere."""
    given: str
    """In ours: YAML."""
    seen: str
    """KIND/NAME and the way to it there: fields, positions and names of entries."""
    expected: str
    """YAML: a part of what is there."""


VERIFIER, POD, CONTAINER = (
    f"Deployment/verifier{way}" for way in ("", " spec.template.spec", " spec.template.spec.containers.0")
)
GATEWAY = "Deployment/gateway spec.template.spec"


def _verifier(given: str) -> str:
    return f"deployments: {{verifier: {{{given}}}}}"


def _pod(known_as: str, field: str, value: str, path: str = "") -> Value:
    return Value(known_as, _verifier(f"{field}: {value}"), f"{POD}.{path or field}", value)


def _container(known_as: str, field: str, value: str) -> Value:
    return Value(known_as, _verifier(f"{field}: {value}"), f"{CONTAINER}.{field}", value)


STANDALONE = [
    Value(
        "routerSpec.replicaCount", "deployments: {gateway: {replicas: 3}}", "Deployment/gateway spec", "{replicas: 3}"
    ),
    Value("modelSpec.replicaCount", _verifier("replicas: 4"), f"{VERIFIER} spec", "{replicas: 4}"),
    _container("modelSpec.repository", "image", "registry.example/own/verifier:7"),
    _container("imagePullPolicy", "imagePullPolicy", "Always"),
    Value(
        "routerSpec.tag",
        "image: {tag: 0.1.0-rc1}",
        GATEWAY + ".containers.0",
        "{image: 'registry.example/x/gateway:0.1.0-rc1'}",
    ),
    Value(
        "the tag of GPU images",
        "image: {tag: 0.1.0-rc1}",
        "Deployment/drafter-model spec.template.spec.containers.0",
        "{image: 'registry.example/x/drafter:0.1.0-rc1-cuda'}",
    ),
    Value(
        "routerSpec.imagePullPolicy",
        "image: {pullPolicy: IfNotPresent}",
        GATEWAY + ".containers.0.imagePullPolicy",
        "IfNotPresent",
    ),
    Value(
        "modelSpec.requestCPU and limitMemory",
        _verifier("resources: {requests: {cpu: 7}, limits: {memory: 200Gi}}"),
        f"{CONTAINER}.resources",
        "{requests: {cpu: 7, memory: 24Gi}, limits: {memory: 200Gi, nvidia.com/gpu: '1'}}",
    ),
    Value(
        "modelSpec.requestGPUType",
        "deployments: {drafter-model: {resources: {limits: {nvidia.com/gpu: null, nvidia.com/mig-3g.40gb: 1}}}}",
        "Deployment/drafter-model spec.template.spec.containers.0.resources.limits",
        "{nvidia.com/mig-3g.40gb: 1, nvidia.com/gpu: absent}",
    ),
    Value(
        "modelSpec.env, vllmConfig.maxModelLen",
        _verifier("env: {VERIFIER_KV_TOKENS: 98304}"),
        f"{CONTAINER}.env.VERIFIER_KV_TOKENS",
        "{value: '98304'}",
    ),
    Value(
        "decode.containers.env",
        _verifier("envFull: [{name: NODE, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}]"),
        f"{CONTAINER}.env.NODE.valueFrom.fieldRef",
        "{fieldPath: spec.nodeName}",
    ),
    _container("envFromSecret", "envFrom", "[{secretRef: {name: tuning}}]"),
    _container("startupProbe", "startupProbe", "{failureThreshold: 720, grpc: {port: 50072, service: liveness}}"),
    _container("livenessProbe", "livenessProbe", "{failureThreshold: 9}"),
    _container("readinessProbe", "readinessProbe", "{periodSeconds: 4}"),
    _container("containerSecurityContext", "securityContext", "{readOnlyRootFilesystem: true, procMount: Default}"),
    _container("decode.containers.extraConfig", "container", "{workingDir: /tmp}")._replace(
        seen=CONTAINER, expected="{workingDir: /tmp}"
    ),
    Value(
        "lifecycle",
        "deployments: {drafter-model: {lifecycle: {preStop: {sleep: {seconds: 9}}}}}",
        "Deployment/drafter-model spec.template.spec.containers.0.lifecycle.preStop.sleep",
        "{seconds: 9}",
    ),
    _pod("nodeSelector", "nodeSelector", "{karpenter.sh/nodepool: h100}"),
    Value(
        "tolerations",
        _verifier("tolerations: [{key: dedicated, operator: Exists, effect: NoSchedule}]"),
        f"{POD}.tolerations.dedicated",
        "{effect: NoSchedule}",
    ),
    Value(
        "tolerations, beside those that are there",
        _verifier("tolerations: [{key: dedicated, operator: Exists, effect: NoSchedule}]"),
        f"{POD}.tolerations.nvidia.com/gpu",
        "{operator: Exists}",
    ),
    Value(
        "affinity",
        _verifier("affinity: {podAntiAffinity: {preferredDuringSchedulingIgnoredDuringExecution: []}}"),
        f"{POD}.affinity",
        "{podAntiAffinity: {preferredDuringSchedulingIgnoredDuringExecution: []}, nodeAffinity: {}}",
    ),
    Value(
        "topologySpreadConstraints",
        _verifier(
            "topologySpreadConstraints: [{topologyKey: topology.kubernetes.io/zone, whenUnsatisfiable: DoNotSchedule}]"
        ),
        f"{POD}.topologySpreadConstraints.topology.kubernetes.io/zone",
        "{whenUnsatisfiable: DoNotSchedule, maxSkew: 1}",
    ),
    Value(
        "podAnnotations",
        _verifier("podAnnotations: {karpenter.sh/do-not-disrupt: 'true'}"),
        f"{VERIFIER} spec.template.metadata.annotations",
        "{karpenter.sh/do-not-disrupt: 'true'}",
    ),
    Value("labels", _verifier("podLabels: {team: llm}"), f"{VERIFIER} spec.template.metadata.labels", "{team: llm}"),
    Value(
        "decode.annotations",
        _verifier("annotations: {a.example/b: c}"),
        f"{VERIFIER} metadata.annotations",
        "{a.example/b: c}",
    ),
    Value("decode.labels", _verifier("labels: {tier: gold}"), f"{VERIFIER} metadata.labels", "{tier: gold}"),
    Value(
        "serviceAccount.annotations",
        _verifier("serviceAccount: {annotations: {eks.amazonaws.com/role-arn: arn}}"),
        "ServiceAccount/verifier metadata.annotations",
        "{eks.amazonaws.com/role-arn: arn}",
    ),
    Value(
        "serviceAccountName",
        "deployments: {drafter-suffix: {serviceAccount: {name: mine}}}",
        "Deployment/drafter-suffix spec.template.spec",
        "{serviceAccountName: mine}",
    ),
    _pod("imagePullSecret", "imagePullSecrets", "[{name: corp}]"),
    _pod("runtimeClassName", "runtimeClassName", "nvidia"),
    _pod("priorityClassName", "priorityClassName", "high"),
    _pod("terminationGracePeriodSeconds", "terminationGracePeriodSeconds", "600"),
    _pod("schedulerName", "schedulerName", "volcano"),
    _pod("hostNetwork", "hostNetwork", "true"),
    _pod("modelSpec.nodeName", "nodeName", "node-7"),
    _pod("securityContext", "podSecurityContext", "{fsGroup: 2000, runAsNonRoot: true}", "securityContext"),
    Value("extraConfig of pods", _verifier("pod: {hostIPC: false}"), POD, "{hostIPC: false}"),
    Value(
        "extraVolumes",
        _verifier("volumes: [{name: extra, configMap: {name: x}}]"),
        f"{POD}.volumes.extra.configMap",
        "{name: x}",
    ),
    Value(
        "modelSpec.shmSize",
        _verifier("volumes: [{name: shm, emptyDir: {sizeLimit: 20Gi}}]"),
        f"{POD}.volumes.shm.emptyDir",
        "{medium: Memory, sizeLimit: 20Gi}",
    ),
    Value(
        "extraVolumeMounts",
        _verifier("volumeMounts: [{name: extra, mountPath: /extra}]"),
        f"{CONTAINER}.volumeMounts.extra",
        "{mountPath: /extra}",
    ),
    Value(
        "sidecars",
        _verifier("extraContainers: [{name: beside, image: 'a/b:1'}]"),
        f"{POD}.containers.beside",
        "{image: 'a/b:1'}",
    ),
    Value(
        "initContainers",
        _verifier("initContainers: [{name: first, image: 'a/b:1'}]"),
        f"{POD}.initContainers.first",
        "{image: 'a/b:1'}",
    ),
    Value(
        "strategy",
        "deployments: {drafter-ngram: {strategy: {type: Recreate}}}",
        "Deployment/drafter-ngram spec.strategy",
        "{type: Recreate, rollingUpdate: absent}",
    ),
    Value(
        "strategy.rollingUpdate",
        "deployments: {gateway: {strategy: {rollingUpdate: {maxSurge: 2}}}}",
        "Deployment/gateway spec.strategy.rollingUpdate",
        "{maxSurge: 2, maxUnavailable: 0}",
    ),
    Value(
        "cacheserverSpec: another image of the store",
        "deployments: {redis: {image: 'corp/valkey:9'}}",
        "StatefulSet/redis spec.template.spec.containers.0",
        "{image: 'corp/valkey:9'}",
    ),
    Value(
        "routerSpec.otel: another collector",
        "deployments: {otel-collector: {image: 'corp/otel:1'}}",
        "Deployment/otel-collector spec.template.spec.containers.0",
        "{image: 'corp/otel:1'}",
    ),
    Value("commonLabels", "commonLabels: {team: x}", "Service/gateway metadata.labels", "{team: x}"),
    Value(
        "commonLabels of pods",
        "commonLabels: {team: x}",
        "Deployment/gateway spec.template.metadata.labels",
        "{team: x}",
    ),
    Value(
        "commonAnnotations",
        "commonAnnotations: {x.example/y: z}",
        "Deployment/gateway metadata.annotations",
        "{x.example/y: z}",
    ),
    Value(
        "global.imagePullSecrets",
        "global: {imagePullSecrets: [corp]}",
        "ServiceAccount/gateway imagePullSecrets.corp",
        "{name: corp}",
    ),
    Value(
        "extraObjects, manifests",
        "extraObjects: [{apiVersion: v1, kind: ConfigMap, metadata: {name: 'in-{{ .Release.Namespace }}'}}]",
        "ConfigMap/in-slipstream",
        "{apiVersion: v1}",
    ),
    Value(
        "maxUnavailablePodDisruptionBudget",
        "overrides: {PodDisruptionBudget/drafter-model: {spec: {maxUnavailable: 2}}}",
        "PodDisruptionBudget/drafter-model spec",
        "{maxUnavailable: 2}",
    ),
    Value(
        "serviceAnnotations",
        "overrides: {Service/gateway: {metadata: {annotations: {x.example/y: z}}}}",
        "Service/gateway metadata.annotations",
        "{x.example/y: z}",
    ),
    Value(
        "secrets.redis.existingSecret",
        "secrets: {redis: {existingSecret: elasticache, key: token}}",
        "StatefulSet/redis spec.template.spec.containers.0.env.VALKEYCLI_AUTH.valueFrom.secretKeyRef",
        "{name: elasticache, key: token}",
    ),
    Value(
        "vllmApiKey.secretName",
        "secrets: {gateway-keys: {existingSecret: keys, key: file}}",
        GATEWAY + ".volumes.keys.secret",
        "{secretName: keys, items: [{key: file, path: api-keys}]}",
    ),
    Value(
        "hf_token.secretName, modelArtifacts.authSecretName",
        "secrets: {hub: {existingSecret: llm-d-hf-token, key: HF_TOKEN}}",
        f"{POD}.initContainers.fetch.env.HF_TOKEN.valueFrom.secretKeyRef",
        "{name: llm-d-hf-token, key: HF_TOKEN}",
    ),
    Value(
        "modelSpec.pvcStorage, modelArtifacts.size",
        "settings: {target_storage: 80Gi}",
        f"{POD}.volumes.models.ephemeral.volumeClaimTemplate.spec.resources.requests",
        "{storage: 80Gi}",
    ),
    Value(
        "modelSpec.storageClass",
        "storageClass: fast",
        f"{POD}.volumes.models.ephemeral.volumeClaimTemplate.spec",
        "{storageClassName: fast}",
    ),
    Value(
        "persistence.storageClass of the store",
        "storageClass: fast",
        "StatefulSet/redis spec.volumeClaimTemplates.0.spec",
        "{storageClassName: fast}",
    ),
    Value(
        "modelURL, modelArtifacts.uri", "models: {target: org/other}", "ConfigMap/models data", "{target: org/other}"
    ),
    Value(
        "acceleratorTypes.labelKey, nodeSelectorTerms",
        "{}",
        "Deployment/drafter-model spec.template.spec.affinity.nodeAffinity"
        ".requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms.0.matchExpressions.0",
        "{key: pool, values: [l4]}",
    ),
    Value("serviceType", "service: {type: LoadBalancer}", "Service/clients spec", "{type: LoadBalancer}"),
    Value(
        "serviceAnnotations of the balancer",
        "service: {annotations: {service.beta.kubernetes.io/aws-load-balancer-scheme: internal}}",
        "Service/clients metadata.annotations",
        "{service.beta.kubernetes.io/aws-load-balancer-scheme: internal}",
    ),
    Value(
        "loadBalancerSourceRanges",
        "service: {loadBalancerSourceRanges: [10.0.0.0/8]}",
        "Service/clients spec",
        "{loadBalancerSourceRanges: [10.0.0.0/8]}",
    ),
    Value(
        "loadBalancerClass",
        "service: {loadBalancerClass: service.k8s.aws/nlb}",
        "Service/clients spec",
        "{loadBalancerClass: service.k8s.aws/nlb}",
    ),
    Value("servicePort", "service: {ports: {grpc: 9443}}", "Service/clients spec.ports.grpc", "{port: 9443}"),
    Value(
        "routerSpec.ingress.enabled",
        "ingress: {enabled: true}",
        "Ingress/clients-http spec",
        "{ingressClassName: traefik}",
    ),
    Value(
        "routerSpec.ingress.hosts",
        "settings: {client_name: llm.example}",
        "Ingress/clients-grpc spec.rules.0",
        "{host: llm.example}",
    ),
    Value(
        "routerSpec.ingress.annotations",
        "ingress: {className: traefik, annotations: {cert-manager.io/cluster-issuer: x}, tlsSecret: t}",
        "Ingress/clients-http metadata.annotations",
        "{cert-manager.io/cluster-issuer: x}",
    ),
    Value(
        "routerSpec.ingress.tls",
        "ingress: {tlsSecret: t}",
        "Ingress/clients-http spec.tls.0",
        "{secretName: t, hosts: [llm.example]}",
    ),
    Value(
        "routing.httpRoute.parentRefs",
        "httpRoute: {enabled: true, parentRefs: [{name: edge, namespace: infra}]}",
        "HTTPRoute/clients spec.parentRefs.edge",
        "{namespace: infra}",
    ),
    Value(
        "routing.httpRoute.hostnames",
        "grpcRoute: {enabled: true}",
        "GRPCRoute/clients spec",
        "{hostnames: [llm.example]}",
    ),
    Value(
        "routing.inferencePool.create",
        "components: {inference-pool: true}",
        "InferencePool/slipstream spec",
        "{targetPorts: [{number: 8000}]}",
    ),
    Value(
        "grafanaDashboards.enabled",
        "components: {monitoring: true}",
        "ConfigMap/grafana-dashboards metadata.labels",
        "{grafana_dashboard: '1'}",
    ),
    Value(
        "serviceMonitor.labels, podmonitor.labels",
        "podMonitor: {labels: {release: kps}, interval: 30s}",
        "PodMonitor/slipstream metadata.labels",
        "{release: kps}",
    ),
    Value(
        "podmonitor.interval",
        "podMonitor: {interval: 30s}",
        "PodMonitor/slipstream spec.podMetricsEndpoints.0",
        "{interval: 30s}",
    ),
    Value(
        "prometheusRule.labels",
        "prometheusRule: {labels: {release: kps}}",
        "PrometheusRule/slipstream metadata.labels",
        "{release: kps}",
    ),
    Value(
        "routerSpec.otel.endpoint",
        "settings: {collector_namespace: otel}",
        "NetworkPolicy/telemetry spec.egress.1.to.1.namespaceSelector.matchLabels",
        "{kubernetes.io/metadata.name: otel}",
    ),
]
"""In the overlay `standalone`, all at once."""
PRODUCTION = [
    Value(
        "defaultRules.runbookUrl",
        "settings: {docs_url: 'https://git.example/x/'}",
        "PrometheusRule/slipstream spec.groups.slipstream-alerts.rules.0.annotations",
        "{runbook_url: 'https://git.example/x/docs/metrics.md#slipstreamacceptancecollapsed'}",
    ),
    Value(
        "keda.minReplicaCount",
        "autoscaling: {verifier: {minReplicas: 3}}",
        "ScaledObject/verifier spec",
        "{minReplicaCount: 3}",
    ),
    Value(
        "keda.maxReplicaCount, autoscaling.maxReplicas",
        "autoscaling: {verifier: {maxReplicas: 5}}",
        "ScaledObject/verifier spec",
        "{maxReplicaCount: 5}",
    ),
    Value(
        "keda.pollingInterval",
        "autoscaling: {gateway: {pollingInterval: 30}}",
        "ScaledObject/gateway spec",
        "{pollingInterval: 30}",
    ),
    Value(
        "keda.cooldownPeriod",
        "autoscaling: {drafter-model: {cooldownPeriod: 360}}",
        "ScaledObject/drafter-model spec",
        "{cooldownPeriod: 360}",
    ),
    Value(
        "keda.fallback.replicas",
        "autoscaling: {verifier: {fallbackReplicas: 4}}",
        "ScaledObject/verifier spec.fallback",
        "{replicas: 4}",
    ),
    Value(
        "keda.triggers.threshold",
        "autoscaling: {verifier: {thresholds: {sessions: 20}}}",
        "ScaledObject/verifier spec.triggers.sessions.metadata",
        "{threshold: '20'}",
    ),
    Value(
        "vllmConfig.tensorParallelSize, parallelism.tensor",
        "components: {multi-gpu-verifier: true}\nvllm: {tensorParallel: 8}",
        f"{CONTAINER}.resources.limits",
        "{nvidia.com/gpu: '8'}",
    ),
    Value(
        "vllmConfig.extraArgs",
        "vllm: {args: --quantization awq}",
        f"{CONTAINER}.env.VERIFIER_VLLM_ARGS",
        "{value: --tensor-parallel-size 8 --quantization awq}",
    ),
    Value(
        "vllmConfig.speculativeConfig",
        """vllm: {speculator: '{"method": "mtp", "num_speculative_tokens": 1}'}""",
        f"{CONTAINER}.env.VERIFIER_VLLM_SPECULATOR",
        """{value: '{"method": "mtp", "num_speculative_tokens": 1}'}""",
    ),
    Value("engine", "components: {multi-gpu-verifier: true}", f"{CONTAINER}.env.VERIFIER_ENGINE", "{value: vllm}"),
    Value(
        "sharedStorage.existingClaim",
        "existingClaims: {models: weights}",
        f"{POD}.volumes.models.persistentVolumeClaim",
        "{claimName: weights, readOnly: true}",
    ),
    Value(
        "torch.compile cache",
        "existingClaims: {caches: compiled}",
        f"{POD}.volumes.caches",
        "{persistentVolumeClaim: {claimName: compiled}, emptyDir: absent}",
    ),
    Value(
        "certificate.dnsNames",
        "settings: {client_name: llm.example}\ncomponents: {public-certificate: true}",
        "Certificate/gateway-clients spec",
        "{dnsNames: [llm.example]}",
    ),
    Value(
        "certificate.issuerRef",
        "settings: {issuer: corp, issuer_kind: Issuer}",
        "Certificate/gateway-clients spec.issuerRef",
        "{name: corp, kind: Issuer}",
    ),
    Value(
        "redis CIDR",
        "settings: {store_cidr: 10.20.0.0/16}",
        "NetworkPolicy/store spec.egress.0.to.0.ipBlock",
        "{cidr: 10.20.0.0/16}",
    ),
    Value(
        "externalRedis.existingSecret",
        "secrets: {gateway-store: {existingSecret: cache, key: uri}}",
        GATEWAY + ".containers.0.env.GATEWAY_STORE.valueFrom.secretKeyRef",
        "{name: cache, key: uri}",
    ),
    Value(
        "ingress.tls of the gateways",
        "secrets: {gateway-clients-tls: {existingSecret: own-tls}}",
        GATEWAY + ".volumes.tls-clients.secret",
        "{secretName: own-tls}",
    ),
    Value("components: tracing off", "components: {tracing: false}", "Deployment/jaeger", "absent"),
    Value("components: spread off", "components: {spread: false}", f"{POD}", "{topologySpreadConstraints: absent}"),
    Value(
        "the model job's memory",
        "deployments: {model-cache: {resources: {limits: {memory: 8Gi}}}}",
        "Job/model-cache spec.template.spec.containers.0.resources.limits",
        "{memory: 8Gi}",
    ),
    Value(
        "global.imageRegistry",
        "global: {imageRegistry: corp.example}",
        GATEWAY + ".containers.0",
        "{image: 'corp.example/registry.example/x/gateway:0.1.0'}",
    ),
]
"""In `production`, all at once."""
CACHED = [
    Value(
        "persistence.models.size",
        "components: {model-cache: true}\nsettings: {shared_storage: 400Gi}",
        "PersistentVolumeClaim/models spec.resources.requests",
        "{storage: 400Gi}",
    ),
    Value(
        "sharedStorage.storageClass",
        "settings: {shared_class: efs}",
        "PersistentVolumeClaim/models spec",
        "{storageClassName: efs}",
    ),
    Value(
        "persistence.redis.existingClaim",
        "existingClaims: {redis: old}",
        "StatefulSet/redis spec.template.spec.volumes.data.persistentVolumeClaim",
        "{claimName: old}",
    ),
    Value("components: priority off", "components: {priority: false}", f"{POD}", "{priorityClassName: absent}"),
    Value(
        "components: api-keys off",
        "components: {api-keys: false}",
        GATEWAY + ".containers.0.env",
        "absent GATEWAY_API_KEYS",
    ),
    Value(
        "components: a collector elsewhere",
        "components: {collector-elsewhere: true}\nsettings: {collector: 'http://otel.otel:4317'}",
        f"{CONTAINER}.env.OTEL_EXPORTER_OTLP_ENDPOINT",
        "{value: 'http://otel.otel:4317'}",
    ),
    Value(
        "components: a client certificate",
        "components: {client-certificate: true}",
        GATEWAY + ".volumes.tls-clients.secret",
        "{secretName: gateway-clients-tls}",
    ),
    Value("components: openshift", "components: {openshift: true}", f"{POD}.securityContext", "{runAsUser: absent}"),
]
"""In `standalone` with models on a shared volume, all at once."""
