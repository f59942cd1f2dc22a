"""Who may use how much, and has room for what it does."""

from __future__ import annotations

from collections.abc import Iterator

from tests.manifests.rendering import Documents, amount, containers, workloads


def limits_are_set(documents: Documents) -> Iterator[str]:
    for workload, container in containers(documents):
        for bound in ("requests", "limits"):
            if missing := {"cpu", "memory", "ephemeral-storage"} - container.get("resources", {}).get(bound, {}).keys():
                yield f"{workload.name}: no {bound} of {', '.join(sorted(missing))}"


def disks_have_room_for_what_is_written(documents: Documents) -> Iterator[str]:
    """Whoever writes more than its limit is evicted, and volumes on the node's disk count, beside logs."""
    for workload in workloads(documents):
        volumes = [volume["emptyDir"] for volume in workload.spec.get("volumes", []) if "emptyDir" in volume]
        sizes = [amount(each["sizeLimit"]) for each in volumes if each.get("medium") != "Memory"]
        limit = sum(amount(each["resources"]["limits"]["ephemeral-storage"]) for each in workload.spec["containers"])
        if sum(sizes) >= limit:
            yield f"{workload.name} is evicted before its volumes are full"


def stores_have_room_for_their_log(documents: Documents) -> Iterator[str]:
    """Redis' pages may be there twice while a child writes. Snapshots would do that for nothing beside the log. While
    it reads the log it answers, but with an error."""
    for workload, container in containers(documents):
        program, *options = container.get("args", [""])
        if program != "valkey-server":
            continue
        given = dict(zip(options[::2], options[1::2], strict=True))
        if given["--appendonly"] != "yes" or given["--save"]:
            yield f"{workload.name} does not keep a log alone"
        if 2 * amount(given["--maxmemory"]) > amount(container["resources"]["limits"]["memory"]):
            yield f"{workload.name} may take more memory than it has while it writes its log anew"
        if container["readinessProbe"]["exec"]["command"] != ["valkey-cli", "-e", "ping"]:
            yield f"{workload.name} is ready before it has read its log"
