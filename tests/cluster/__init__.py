"""The manifests on a real Kubernetes control plane: `make test-cluster`.

API server, scheduler, controllers and etcd are real, out of the folder that `KUBEBUILDER_ASSETS` names. Nodes are made
up (`nodes.py`), and pods are processes (`pod.py`), each in a network namespace with the pod's address, environment,
mounts, probes and grace; so Services are looked up by DNS (`dns.py`), and there is no kube-proxy and no network policy.

`python -m tests.cluster` runs these tests in namespaces of their own for network, mounts and processes: nothing is left
behind, however they end. What is missing on this machine makes it fail, and is named.
"""
