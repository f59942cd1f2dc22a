"""The cluster's DNS: names of Services are the addresses of their ready pods, whether they are headless or not."""

from __future__ import annotations

import socket
import struct
import threading

from tests.cluster.api import Api

ADDRESS = "10.244.0.1"
TTL_S = 2
REFUSED, NOT_FOUND = 5, 3


class Dns(threading.Thread):
    """Answers on UDP 53."""

    def __init__(self, api: Api) -> None:
        super().__init__(daemon=True)
        self._api = api
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((ADDRESS, 53))

    def run(self) -> None:
        while True:
            asked, client = self._socket.recvfrom(512)
            threading.Thread(target=self._answer, args=(asked, client), daemon=True).start()

    def _answer(self, asked: bytes, client: tuple[str, int]) -> None:
        at, labels = 12, []
        while asked[at]:
            labels.append(asked[at + 1 : at + 1 + asked[at]].decode())
            at += 1 + asked[at]
        (kind,) = struct.unpack(">H", asked[at + 1 : at + 3])
        try:
            found, code = self._addresses(labels)
        except OSError:
            found, code = [], REFUSED
        records = [b"\xc0\x0c" + struct.pack(">HHIH", 1, 1, TTL_S, 4) + socket.inet_aton(a) for a in found if kind == 1]
        head = asked[:2] + struct.pack(">HHHHH", 0x8580 | code, 1, len(records), 0, 0)
        self._socket.sendto(head + asked[12 : at + 5] + b"".join(records), client)

    def _addresses(self, labels: list[str]) -> tuple[list[str], int]:
        if labels[2:] != ["svc", "cluster", "local"]:
            return [], NOT_FOUND
        name, namespace = labels[:2]
        services = f"/api/v1/namespaces/{namespace}/services"
        if name not in {each["metadata"]["name"] for each in self._api.items(services)}:
            return [], NOT_FOUND
        label = f"kubernetes.io/service-name%3D{name}"
        path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices?labelSelector={label}"
        ends = [end for each in self._api.items(path) for end in each.get("endpoints") or []]
        return [address for end in ends if end["conditions"].get("ready") for address in end["addresses"]], 0
