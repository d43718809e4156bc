"""Clusters by name, from the data sheets of their devices, and from TOML files.

`"4x8xA100-80GB"` is four nodes of eight, `"8xH100-80GB"` one node; an unambiguous beginning of a name will do (`8xH200`). A processor is one
device of all its cores: `"2xXEON-8480"` is one server with two sockets, `"16x2xXEON-8480"` sixteen of them. docs/planner.md describes the files.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from echelon.errors import DocumentError
from echelon.plan.cluster import Cluster, DataSheet, Device, Interconnect, Node
from echelon.plan.codec import from_plain
from echelon.plan.datasheets import (
    DEFAULT_VARIANTS,
    DEVICES,
    HOURLY_PRICES,
    INTER_NODE_LINKS,
    INTRA_NODE_LINKS,
    PROCESSORS,
    RATED_WATTS,
)

_Link = Interconnect | None
_TERA, _GIGA = 1e12, 1e9
#: Fraction of a card's nominal memory (in GiB) that torch sees: "80GB" cards show about 79 GiB.
VISIBLE_MEMORY_FRACTION = 0.99
#: Host cores and memory of a node of GPUs: enough not to be a bottleneck.
_GPU_NODE_CORES, _GPU_NODE_MEMORY = 96, 2**40
_MAX_SOCKETS = 2
#: Anything larger is a typo.
_MAX_DEVICES, _MAX_MEMORY_GB = 2**20, 2**20
#: By section of a TOML file. A mesh has a direct link between every two devices.
_LINK_KINDS = {
    "inside": ("nvswitch", "nvlink-mesh", "xgmi-mesh", "pcie", "other"),
    "between": ("infiniband", "roce", "ethernet", "efa", "slingshot", "omnipath", "other"),
}
_REQUIRED_OF_UNKNOWN_DEVICES = ("memory_gb", "bandwidth_gb_s", "units", "vector_tflops", "tflops")


def device_names() -> tuple[str, ...]:
    """Every device of the catalogue."""
    return (*DEVICES, *PROCESSORS)


def rated_watts(name: str) -> float:
    """Rated power of a device of the catalogue."""
    if name not in RATED_WATTS:
        raise DocumentError(f"{name}: no rated power in the catalogue; it is known for {', '.join(RATED_WATTS)}")
    return RATED_WATTS[name]


def resolve_device_name(name: str) -> str:
    """The full name of a device: H200-141GB for H200."""
    matches = _matching_device_names(name)
    if len(matches) > 1:
        raise DocumentError(f"{name} is ambiguous: use {' or '.join(matches)}")
    if not matches:
        remedy = "describe other devices in a TOML file"
        raise DocumentError(f"{name}: no such device in the catalogue; it has {', '.join(device_names())}; {remedy}")
    return matches[0]


def _matching_device_names(name: str) -> list[str]:
    full_names = {known.lower(): known for known in device_names()}
    full_names |= {alias.lower(): full_name for alias, full_name in DEFAULT_VARIANTS.items()}
    if name.lower() in full_names:
        return [full_names[name.lower()]]
    return [known for known in device_names() if known.lower().startswith(f"{name.lower()}-")]


def catalogue_device(name: str) -> Device:
    """A device of the catalogue."""
    name = resolve_device_name(name)
    price = HOURLY_PRICES.get(name)
    if name in PROCESSORS:
        memory, bandwidth, cores, tflops, half_tflops, dtypes, source = PROCESSORS[name]
        vector, bandwidth = tflops * _TERA, bandwidth * _GIGA
        peaks = {"fp32": vector} | ({"half": half_tflops * _TERA} if half_tflops else {})
        sheet = DataSheet(peaks=peaks, vector=vector, bandwidth=bandwidth, units=cores, source=source, price=price)
        return Device(kind="cpu", name=name, memory=int(memory * 2**30), cores=cores, instructions=dtypes, sheet=sheet)
    memory, bandwidth, units, vector_tflops, legacy, tflops_by_precision, source = DEVICES[name]
    sheet = DataSheet(
        peaks={precision: tflops * _TERA for precision, tflops in tflops_by_precision.items()},
        vector=vector_tflops * _TERA, bandwidth=bandwidth * _GIGA, units=units, legacy=legacy, source=source, price=price,
    )  # fmt: skip
    return Device(kind="cuda", name=name, memory=int(memory * VISIBLE_MEMORY_FRACTION * 2**30), sheet=sheet)


def parse_cluster(text: str) -> Cluster:
    """`8xH100-80GB` or `4x8xA100-80GB`: nodes, devices per node, name; or the path of a TOML file."""
    if text.endswith(".toml"):
        return load_cluster_toml(text)
    match = re.fullmatch(r"(?:(\d+)x)??(?:(\d+)x)?([A-Za-z][\w-]*)", text)
    if match is None:
        forms = "8xH100-80GB (one node), 4x8xA100-80GB (four nodes) or the path of a .toml file"
        raise DocumentError(f"{text}: a cluster is written {forms}")
    name, count = resolve_device_name(match[3]), int(match[2] or 1)
    links = {"intra_node": intra_node_link(name), "inter_node": inter_node_link(name, count)}
    return build_cluster(text, catalogue_device(name), count, int(match[1] or 1), **links)


def intra_node_link(name: str) -> Interconnect | None:
    """The link between such devices in a node; None: not in the catalogue."""
    if name not in INTRA_NODE_LINKS:
        return None
    kind, rate, domain, source = INTRA_NODE_LINKS[name]
    return Interconnect(kind=kind, rate=rate * _GIGA, domain=domain, source=source)


def inter_node_link(name: str, count: int | None = None) -> Interconnect | None:
    """The usual network between nodes of `count` such devices, each of which brings its ports; None: not in the catalogue."""
    if name not in INTER_NODE_LINKS:
        return None
    kind, rate, devices_per_node, source = INTER_NODE_LINKS[name]
    share = min(count / devices_per_node, 1.0) if devices_per_node and count else 1.0
    source = source if share == 1 else f"{count} of {devices_per_node} devices; {source}"
    return Interconnect(kind=kind, rate=share * rate * _GIGA, source=source)


def build_cluster(
    name: str, device: Device, devices_per_node: int, node_count: int, *, intra_node: _Link, inter_node: _Link
) -> Cluster:
    """`node_count` nodes of `devices_per_node` devices (sockets of a processor), with the links that their ranks need."""
    if devices_per_node < 1 or node_count < 1 or devices_per_node * node_count > _MAX_DEVICES:
        sizes = f"{node_count} nodes of {devices_per_node} devices"
        raise DocumentError(f"{name}: {sizes}; at least 1 of both, {_MAX_DEVICES:,} devices at most")
    if devices_per_node > 1 and intra_node is None and device.kind == "cuda":
        remedy = "describe it under [inside]: kind, gb_s per device and direction"
        raise DocumentError(f"{name}: {devices_per_node} devices per node and no link between them; {remedy}")
    if node_count > 1 and inter_node is None:
        remedy = "describe it under [between]: kind, gb_s per node and direction"
        raise DocumentError(f"{name}: {node_count} nodes and no link between them; {remedy}")
    devices, cores, memory = (device,) * devices_per_node, _GPU_NODE_CORES, _GPU_NODE_MEMORY
    if device.kind == "cpu":
        server = _combine_sockets(name, device, devices_per_node)
        devices, cores, memory = (server,), server.cores, server.memory
    node = Node(name=f"{name} node", cores=cores, memory=memory, devices=devices, wire=intra_node)
    return Cluster(name=name, nodes=(node,) * node_count, versions={}, network=inter_node if node_count > 1 else None)


def _combine_sockets(name: str, device: Device, count: int) -> Device:
    """All processors of a server as one device."""
    if count > _MAX_SOCKETS:
        alternative = f"{count}x1x{device.name} is {count} servers"
        raise DocumentError(f"{name}: a server has at most {_MAX_SOCKETS} sockets, not {count}; {alternative}")
    sheet = device.sheet
    if count == 1 or sheet is None:
        return device
    sheet = replace(
        sheet,
        peaks={precision: count * flops for precision, flops in sheet.peaks.items()},
        vector=count * sheet.vector,
        bandwidth=count * sheet.bandwidth,
        units=count * sheet.units,
        price=None if sheet.price is None else count * sheet.price,
    )
    name = f"{count} x {device.name}"
    return replace(device, name=name, memory=count * device.memory, cores=count * device.cores, sheet=sheet)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTable:
    """[inside] or [between] of a cluster's TOML file."""

    kind: str
    gb_s: float  #: in each direction
    domain: int = 0
    share: float | None = None
    source: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTable:
    """[device]: its name, or everything about one that is not in the catalogue."""

    name: str
    count: int = 1
    memory_gb: float | None = None
    units: int | None = None
    tflops: dict[str, float] | None = None
    bandwidth_gb_s: float | None = None
    vector_tflops: float | None = None
    power: float | None = None
    legacy: float | None = None
    price: float | None = None
    source: str | None = None

    def __post_init__(self) -> None:
        if self.memory_gb is not None and not 1 <= self.memory_gb <= _MAX_MEMORY_GB:
            raise ValueError(f"memory_gb={self.memory_gb:g} is not between 1 and {_MAX_MEMORY_GB:,}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTable:
    """[[group]]: nodes that are alike."""

    device: DeviceTable
    nodes: int = 1
    inside: LinkTable | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterTable:
    """A cluster's TOML file: one group of nodes, or several."""

    name: str | None = None
    device: DeviceTable | None = None
    nodes: int = 1
    inside: LinkTable | None = None
    group: tuple[GroupTable, ...] = ()
    between: LinkTable | None = None

    @property
    def groups(self) -> tuple[GroupTable, ...]:
        """The groups of nodes, in the order of their ranks."""
        if self.device is None:
            return self.group
        return (GroupTable(device=self.device, nodes=self.nodes, inside=self.inside),)

    def __post_init__(self) -> None:
        if bool(self.group) == (self.device is not None) or (self.group and (self.nodes != 1 or self.inside)):
            raise ValueError("needs either [device], nodes and [inside], or a list of [[group]] with these")


def load_cluster_toml(path: str | Path) -> Cluster:
    """The cluster that a TOML file describes."""
    try:
        document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise DocumentError(f"{path}: cannot be read as a cluster ({error})") from error
    table = from_plain(ClusterTable, document, str(path))
    network, name = _read_link(path, table.between, "between"), table.name or Path(path).stem
    if table.group and network is None and (len(table.group) > 1 or table.group[0].nodes != 1):
        raise DocumentError(f"{path}: groups of nodes and no link between them; describe it under [between]")
    clusters = [_build_group(path, group, name, network) for group in table.groups]
    nodes = tuple(node for cluster in clusters for node in cluster.nodes)
    notes = tuple(dict.fromkeys(note for cluster in clusters for note in cluster.notes))
    if len({node.devices[0].kind for node in nodes}) > 1:
        raise DocumentError(f"{path}: groups of processors and of GPUs: all ranks need devices of one kind")
    return replace(clusters[0], nodes=nodes, network=clusters[0].network if len(nodes) > 1 else None, notes=notes)


def _build_group(path: str | Path, group: GroupTable, cluster_name: str, network: Interconnect | None) -> Cluster:
    """Nodes that are alike. A link that the file leaves out is the catalogue's, with a note."""
    count = group.device.count
    known_name = resolve_device_name(group.device.name) if _matching_device_names(group.device.name) else None
    device = _read_device(path, group.device, known_name)
    inside = _read_link(path, group.inside, "inside")
    if inside is not None and inside.domain and (count < 1 or inside.domain % count):
        rule = f"the devices that share a link are those of whole nodes, of {count} each"
        raise DocumentError(f"{path}: inside.domain={inside.domain}: {rule}")
    links, notes = {"inside": inside, "between": network}, []
    if known_name is not None:
        defaults = {"between": inter_node_link(known_name, count)}
        if device.kind == "cuda":
            defaults = {"inside": intra_node_link(known_name), **defaults}
        is_used = {"inside": count > 1, "between": group.nodes > 1}
        for section, link in defaults.items():
            if links[section] is None and link is not None:
                links[section] = link
                unit = "device" if section == "inside" else "node"
                rate = f"{link.rate / _GIGA:.4g} GB/s per {unit} and direction"
                note = f"{path} does not describe [{section}]: assuming {link.kind} of {rate} ({link.source})"
                notes += [note] if is_used[section] else []
    intra_node, inter_node = links["inside"], links["between"]
    cluster = build_cluster(cluster_name, device, count, group.nodes, intra_node=intra_node, inter_node=inter_node)
    return replace(cluster, notes=tuple(notes))


def _read_device(path: str | Path, table: DeviceTable, known_name: str | None) -> Device:
    missing = [key for key in _REQUIRED_OF_UNKNOWN_DEVICES if getattr(table, key) is None]
    if known_name is None and missing:
        raise DocumentError(f"{path}: device {table.name} is not in the catalogue and needs {', '.join(missing)}")
    if known_name is not None:
        device = catalogue_device(known_name)
    else:
        placeholder = DataSheet(peaks={"fp32": 1.0}, vector=1.0, bandwidth=1.0, units=1)
        device = Device(kind="cuda", name=table.name, memory=1, sheet=placeholder)
    assert device.sheet is not None
    changes: dict[str, Any] = {name: getattr(table, name) for name in ("units", "power", "legacy", "price", "source")}
    changes["bandwidth"] = table.bandwidth_gb_s and table.bandwidth_gb_s * _GIGA
    changes["vector"] = table.vector_tflops and table.vector_tflops * _TERA
    if table.tflops is not None:
        peaks = {precision: tflops * _TERA for precision, tflops in table.tflops.items()}
        changes["peaks"] = device.sheet.peaks | peaks if known_name else peaks
    changes = {name: value for name, value in changes.items() if value is not None}
    try:
        device = replace(device, sheet=replace(device.sheet, **changes))
    except ValueError as error:
        raise DocumentError(f"{path}: [device] {error}") from error
    if table.memory_gb is None:
        return device
    # torch sees all of a host's memory, but not all of a card's.
    visible_fraction = 1.0 if device.kind == "cpu" else VISIBLE_MEMORY_FRACTION
    return replace(device, memory=int(table.memory_gb * visible_fraction * 2**30))


def _read_link(path: str | Path, table: LinkTable | None, section: str) -> Interconnect | None:
    if table is None:
        return None
    if table.kind not in _LINK_KINDS[section]:
        raise DocumentError(f"{path}: {section}.kind={table.kind!r}: not one of {', '.join(_LINK_KINDS[section])}")
    rate, source = table.gb_s * _GIGA, table.source or str(path)
    try:
        return Interconnect(kind=table.kind, rate=rate, domain=table.domain, share=table.share, source=source)
    except ValueError as error:
        raise DocumentError(f"{path}: [{section}] {error}") from error
