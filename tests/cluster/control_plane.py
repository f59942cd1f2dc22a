"""etcd, API server, controllers and scheduler as processes of this machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from tests.cluster.api import Api, wait
from tests.cluster.programs import running

TOKEN = "administrator"
ETCD, SERVER = "http://127.0.0.1:2379", "https://127.0.0.1:6443"
START_S = 120.0
NOT_HERE = (
    "bootstrap-signer-controller",
    "token-cleaner-controller",
    "node-ipam-controller",
    "service-lb-controller",
    "cloud-node-lifecycle-controller",
    "root-ca-certificate-publisher-controller",
)
"""Controllers that nothing here needs."""


@contextmanager
def control_plane(folder: Path) -> Iterator[tuple[Api, Path]]:
    """The API, and kubectl's configuration for it; logs lie in the folder."""
    config = _configuration(folder)
    with ExitStack() as stack:

        def start(name: str, *options: str) -> None:
            stack.enter_context(running(folder, name, *options))

        start(
            "etcd",
            "--data-dir=etcd",
            f"--listen-client-urls={ETCD}",
            f"--advertise-client-urls={ETCD}",
            "--unsafe-no-fsync",
        )
        start(
            "kube-apiserver",
            f"--etcd-servers={ETCD}",
            "--bind-address=127.0.0.1",
            "--advertise-address=10.244.0.1",
            "--secure-port=6443",
            "--cert-dir=certificates",
            "--token-auth-file=tokens.csv",
            "--authorization-mode=RBAC",
            "--service-cluster-ip-range=10.96.0.0/16",
            "--service-account-issuer=https://kubernetes.default.svc",
            "--service-account-signing-key-file=accounts.key",
            "--service-account-key-file=accounts.key",
        )
        api = Api(SERVER, TOKEN)
        wait(lambda: _ready(api), f"the API server is ready ({folder})", START_S)
        alike = [f"--{use}kubeconfig={config}" for use in ("", "authentication-", "authorization-")]
        start(
            "kube-controller-manager",
            *alike,
            "--service-account-private-key-file=accounts.key",
            "--leader-elect=false",
            "--node-monitor-grace-period=24h",  # nodes are made up: whoever loses one says so
            f"--controllers=*,{','.join(f'-{name}' for name in NOT_HERE)}",
        )
        start("kube-scheduler", *alike, "--leader-elect=false")
        yield api, config


def _configuration(folder: Path) -> Path:
    key = rsa.generate_private_key(65537, 2048)
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption())
    (folder / "accounts.key").write_bytes(key.private_bytes(*form))
    (folder / "tokens.csv").write_text(f'{TOKEN},administrator,1,"system:masters"\n')
    made = folder / "kubeconfig"
    made.write_text(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "c",
                "clusters": [{"name": "c", "cluster": {"server": SERVER, "insecure-skip-tls-verify": True}}],
                "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
                "users": [{"name": "u", "user": {"token": TOKEN}}],
            }
        )
    )
    made.chmod(0o600)
    return made


def _ready(api: Api) -> bool:
    try:
        return bool(api.items("/api/v1/namespaces"))
    except OSError:
        return False
