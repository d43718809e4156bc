"""Heterogeneous clusters, split into one cluster per kind of device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from echelon.errors import PlanError
from echelon.plan.batch_split import local_batch_sizes
from echelon.plan.cluster import Cluster, Device
from echelon.plan.plan import Plan


def uses_data_sheets(cluster: Cluster) -> bool:
    """Whether its devices have data sheets and were not measured."""
    device = cluster.nodes[0].devices[0]
    return device.sheet is not None and not device.curves


def rank_devices(cluster: Cluster) -> list[Device]:
    """The device of each rank: every node contributes as many as the smallest has."""
    per_node = min(len(node.devices) for node in cluster.nodes)
    return [device for node in cluster.nodes for device in node.devices[:per_node]]


def distinct_devices(devices: Iterable[Device]) -> list[Device]:
    """One device of each kind."""
    distinct: list[Device] = []
    for device in {id(candidate): candidate for candidate in devices}.values():
        if device not in distinct:
            distinct.append(device)
    return distinct


def device_kinds_by_rank(cluster: Cluster) -> list[int]:
    """The kind of device of each possible rank."""
    devices = rank_devices(cluster)
    kinds = distinct_devices(device for node in cluster.nodes for device in node.devices)
    kind_by_id = {id(device): kinds.index(device) for device in {id(each): each for each in devices}.values()}
    return [kind_by_id[id(device)] for device in devices]


def split_by_device_kind(cluster: Cluster, ranks: int | None = None) -> list[Cluster]:
    """For each kind of device, the cluster with that kind only and the slowest link of the nodes of the first `ranks` ranks."""
    devices = distinct_devices(device for node in cluster.nodes for device in node.devices)
    if len(devices) == 1:
        return [cluster]
    missing = next((device.name for device in devices if device.sheet is None), None)
    if missing is not None:
        raise PlanError(
            f"{cluster.name}: {missing} has no data sheet, unlike other devices; add it to the cluster file"
        )
    per_node = min(len(node.devices) for node in cluster.nodes)
    nodes = cluster.nodes if ranks is None else cluster.nodes[: -(-ranks // per_node)]
    wire = min((node.wire for node in nodes if node.wire is not None), key=lambda wire: wire.rate, default=None)
    names = " and ".join(sorted({device.name for device in devices}))
    notes = [f"{names}: ranks with the same work wait for the slowest, and a plan must fit on each"]
    unused = sum(len(node.devices) for node in cluster.nodes) - per_node * len(cluster.nodes)
    notes += [f"{unused} devices of larger nodes are not used"] if unused else []
    return [
        replace(
            cluster,
            nodes=tuple(replace(node, devices=(device,) * per_node, wire=wire) for node in cluster.nodes),
            notes=(*cluster.notes, *notes),
        )
        for device in devices
    ]


def ranks_by_device_kind(
    batch: int, plan: Plan, kind_by_rank: Sequence[int], kinds: int
) -> list[tuple[int | None, tuple[int, ...]]]:
    """For each of `kinds` kinds of device: (largest local batch on it, None for the plan's largest; its ranks of pp).

    Without a pipeline, ranks differ only in their shares of the batch.
    """
    mesh, shares = plan.mesh, plan.data.batch_shares
    if kinds == 1:
        return [(None, tuple(range(mesh.pp)))]
    if mesh.pp > 1:
        kinds_by_stage = stage_device_kinds(plan, kind_by_rank)
        return [(None, tuple(rank for rank in range(mesh.pp) if kind in kinds_by_stage[rank])) for kind in range(kinds)]
    if not shares or plan.ranks != mesh.dp or batch < mesh.dp:
        used_kinds = set(kind_by_rank[: plan.ranks])
        return [(None, (0,) if kind in used_kinds else ()) for kind in range(kinds)]
    sizes = list(zip(kind_by_rank, local_batch_sizes(batch, mesh.dp, shares), strict=False))
    largest = [max((size for each, size in sizes if each == kind), default=0) for kind in range(kinds)]
    return [(size, (0,) if size else ()) for size in largest]


def stage_device_kinds(plan: Plan, kind_by_rank: Sequence[int]) -> list[set[int]]:
    """For each rank of pp, the kinds of device in its contiguous range."""
    size = plan.ranks // plan.mesh.pp
    return [set(kind_by_rank[rank * size : (rank + 1) * size]) for rank in range(plan.mesh.pp)]
