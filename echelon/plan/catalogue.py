"""Devices and machines by name, from their data sheets, and a user's own from a TOML file.

`"4x8xA100-80GB"` is four nodes of eight, `"8xH100-80GB"` one node; a name that begins only one of the catalogue's will do (`8xH200`). A
processor is one device of all its cores: `"2xXEON-8480"` is one server of two sockets, `"16x2xXEON-8480"` sixteen. A TOML file says the same of
anything else:

    name = "ours"
    nodes = 4
    [device]
    name = "H100-80GB"          # of the catalogue; any figure below it replaces the catalogue's
    count = 8                   # per node
    legacy = 0.63               # share of the peak that kernels with matrix instructions of earlier devices reach
    power = 0.7                 # power that it is allowed, as a share of what it is rated at
    price = 2.5                 # of one device for an hour
    [inside]                    # between the devices of a node
    kind = "nvswitch"
    gb_s = 450                  # per device and direction
    [between]                   # between nodes
    kind = "infiniband"
    gb_s = 400                  # per node and direction

A link that is not described is the catalogue's for such devices, and a note of the cluster says so; where the catalogue has none it is an error.
Machines that are not alike are groups of such nodes, in the order of their ranks, with one [between] for all:

    [[group]]
    nodes = 2
    device = { name = "H100-80GB", count = 8 }
    [[group]]
    nodes = 4
    device = { name = "A100-80GB", count = 8 }
    [between]
    kind = "infiniband"
    gb_s = 200
"""

from __future__ import annotations

import math
import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

from echelon.errors import DocumentError
from echelon.plan.cluster import Cluster, DataSheet, Device, Interconnect, Node
from echelon.plan.datasheets import (
    DEFAULT_VARIANTS,
    DEVICES,
    HOURLY_PRICES,
    INTER_NODE_LINKS,
    INTRA_NODE_LINKS,
    PROCESSORS,
    RATED_WATTS,
)

_TERA, _GIGA = 1e12, 1e9
#: Of a card's name-plate memory (in GiB) what torch sees: "80GB" cards show about 79 GiB.
VISIBLE_MEMORY_FRACTION = 0.99

#: Host cores and memory of a node of GPUs: enough that they do not bind.
_GPU_NODE_CORES, _GPU_NODE_MEMORY = 96, 2**40
#: Processors that a server of the catalogue takes.
_MAX_SOCKETS = 2


def device_names() -> tuple[str, ...]:
    """Every device that is known by name."""
    return (*DEVICES, *PROCESSORS)


def rated_watts(name: str) -> float:
    """Rated power of a device of the catalogue."""
    if name not in RATED_WATTS:
        raise DocumentError(f"{name}: the catalogue knows no rated power of it; it has {', '.join(RATED_WATTS)}")
    return RATED_WATTS[name]


def resolve_device_name(name: str) -> str:
    """The catalogue's name for what begins it: H200 for H200-141GB."""
    matches = _matching_device_names(name)
    if len(matches) > 1:
        raise DocumentError(f"{name}: {' or '.join(matches)}? say which")
    if not matches:
        raise DocumentError(
            f"{name}: no such device in the catalogue; it has {', '.join(device_names())}, a TOML file gives any other"
        )
    return matches[0]


def _matching_device_names(name: str) -> list[str]:
    """The devices that a name, or the beginning of one, may mean."""
    lowercase_name = name.lower()
    exact = [device_name for device_name in device_names() if device_name.lower() == lowercase_name] or [
        full_name for alias, full_name in DEFAULT_VARIANTS.items() if alias.lower() == lowercase_name
    ]
    return exact or [
        device_name for device_name in device_names() if device_name.lower().startswith(f"{lowercase_name}-")
    ]


def catalogue_device(name: str) -> Device:
    """A device of the catalogue."""
    name = resolve_device_name(name)
    price = HOURLY_PRICES.get(name)
    if name in PROCESSORS:
        memory, bandwidth, cores, fp32_tflops, half_tflops, fast_dtypes, source = PROCESSORS[name]
        peaks = {"fp32": fp32_tflops * _TERA} | ({"half": half_tflops * _TERA} if half_tflops else {})
        sheet = DataSheet(
            peaks=peaks,
            vector=fp32_tflops * _TERA,
            bandwidth=bandwidth * _GIGA,
            units=cores,
            source=source,
            price=price,
        )
        return Device(
            kind="cpu", name=name, memory=int(memory * 2**30), cores=cores, instructions=fast_dtypes, sheet=sheet
        )
    memory, bandwidth, units, vector_tflops, legacy_fraction, tflops_by_precision, source = DEVICES[name]
    sheet = DataSheet(
        peaks={precision: tflops * _TERA for precision, tflops in tflops_by_precision.items()},
        vector=vector_tflops * _TERA,
        bandwidth=bandwidth * _GIGA,
        units=units,
        legacy=legacy_fraction,
        source=source,
        price=price,
    )
    return Device(kind="cuda", name=name, memory=int(memory * VISIBLE_MEMORY_FRACTION * 2**30), sheet=sheet)


def parse_cluster(text: str) -> Cluster:
    """`8xH100-80GB` or `4x8xA100-80GB`: nodes, devices in each, name; or the path of a TOML file."""
    if text.endswith(".toml"):
        return load_cluster_toml(text)
    match = re.fullmatch(r"(?:(\d+)x)??(?:(\d+)x)?([A-Za-z][\w-]*)", text)
    if match is None:
        raise DocumentError(
            f"{text}: a cluster is written 8xH100-80GB (one node) or 4x8xA100-80GB (four), or is the path of a .toml file"
        )
    name, count = resolve_device_name(match[3]), int(match[2] or 1)
    return build_cluster(
        text,
        catalogue_device(name),
        count,
        int(match[1] or 1),
        intra_node=intra_node_link(name),
        inter_node=inter_node_link(name, count),
    )


def intra_node_link(name: str) -> Interconnect | None:
    """What joins such devices in a node; None: the catalogue does not say."""
    if name not in INTRA_NODE_LINKS:
        return None
    kind, rate, domain, source = INTRA_NODE_LINKS[name]
    return Interconnect(kind=kind, rate=rate * _GIGA, domain=domain, source=source)


def inter_node_link(name: str, count: int | None = None) -> Interconnect | None:
    """What usually joins nodes of `count` such devices, each of which brings its ports; None: the catalogue does not say."""
    if name not in INTER_NODE_LINKS:
        return None
    kind, rate, devices_per_node, source = INTER_NODE_LINKS[name]
    share = min(count / devices_per_node, 1.0) if devices_per_node and count else 1.0
    source = source if share == 1 else f"{count} of {devices_per_node} devices; {source}"
    return Interconnect(kind=kind, rate=share * rate * _GIGA, source=source)


def build_cluster(
    name: str,
    device: Device,
    devices_per_node: int,
    node_count: int,
    *,
    intra_node: Interconnect | None,
    inter_node: Interconnect | None,
) -> Cluster:
    """`node_count` nodes of `devices_per_node` devices (sockets where they are processors). Links that its ranks will need must be given."""
    if devices_per_node < 1 or node_count < 1:
        raise DocumentError(f"{name}: {node_count} nodes of {devices_per_node} devices; both are at least 1")
    if devices_per_node * node_count > _MAX_DEVICES:
        raise DocumentError(
            f"{name}: {node_count} nodes of {devices_per_node} devices; {_MAX_DEVICES:,} devices at most"
        )
    if devices_per_node > 1 and intra_node is None and device.kind == "cuda":
        raise DocumentError(
            f"{name}: {devices_per_node} devices in a node and no link between them; describe it under [inside]: kind, gb_s per device and direction"
        )
    if node_count > 1 and inter_node is None:
        raise DocumentError(
            f"{name}: {node_count} nodes and no link between them; describe it under [between]: kind, gb_s per node and direction"
        )
    if device.kind == "cpu":
        device = _combine_sockets(name, device, devices_per_node)
        node = Node(name=f"{name} node", cores=device.cores, memory=device.memory, devices=(device,), wire=intra_node)
    else:
        node = Node(
            name=f"{name} node",
            cores=_GPU_NODE_CORES,
            memory=_GPU_NODE_MEMORY,
            devices=(device,) * devices_per_node,
            wire=intra_node,
        )
    return Cluster(name=name, nodes=(node,) * node_count, versions={}, network=inter_node if node_count > 1 else None)


def _combine_sockets(name: str, device: Device, count: int) -> Device:
    """All processors of a server as one device."""
    if count > _MAX_SOCKETS:
        raise DocumentError(
            f"{name}: {count} x {device.name}: a server has {_MAX_SOCKETS} sockets at most; {count}x1x{device.name} is {count} servers"
        )
    sheet = device.sheet
    if count == 1 or sheet is None:
        return device
    return replace(
        device,
        name=f"{count} x {device.name}",
        memory=count * device.memory,
        cores=count * device.cores,
        sheet=replace(
            sheet,
            peaks={precision: count * flops for precision, flops in sheet.peaks.items()},
            vector=count * sheet.vector,
            bandwidth=count * sheet.bandwidth,
            units=count * sheet.units,
            price=None if sheet.price is None else count * sheet.price,
        ),
    )


_SHEET_KEYS = {  # key of the file: (field of the sheet, its unit)
    "bandwidth_gb_s": ("bandwidth", _GIGA),
    "vector_tflops": ("vector", _TERA),
    "power": ("power", 1.0),
    "legacy": ("legacy", 1.0),
    "price": ("price", 1.0),
}
_DEVICE_KEYS = ("name", "count", "memory_gb", "units", "tflops", *_SHEET_KEYS, "source")
#: What a device that is not in the catalogue needs.
_REQUIRED_KEYS = ("memory_gb", "bandwidth_gb_s", "units", "vector_tflops", "tflops")
_LINK_KEYS = ("kind", "gb_s", "domain", "share", "source")
#: What links are called: inside, one that ends in mesh joins each pair of devices by wires of its own.
_LINK_KINDS = {
    "inside": ("nvswitch", "nvlink-mesh", "xgmi-mesh", "pcie", "other"),
    "between": ("infiniband", "roce", "ethernet", "efa", "slingshot", "omnipath", "other"),
}
#: More devices than any machine has are a slip of the pen.
_MAX_DEVICES, _MAX_MEMORY_GB = 2**20, 2**20


def load_cluster_toml(path: str | Path) -> Cluster:
    """The cluster that a TOML file describes."""
    try:
        document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise DocumentError(f"{path}: cannot be read as a cluster ({error})") from error
    cluster_name = _require_text(path, "name", document.get("name", Path(path).stem))
    network = _read_link(path, document, "between")
    if "group" not in document:
        _reject_unknown_keys(path, document, ("name", "nodes", "device", "inside", "between"))
        return _read_uniform_cluster(path, document, cluster_name, network)
    _reject_unknown_keys(path, document, ("name", "group", "between"))
    groups = document["group"]
    if not isinstance(groups, list) or not groups or not all(isinstance(group, dict) for group in groups):
        raise DocumentError(f"{path}: [[group]] is a list of groups of nodes, each with a device")
    if network is None and (len(groups) > 1 or groups[0].get("nodes", 1) != 1):
        raise DocumentError(f"{path}: groups of nodes and no link between them; describe it under [between]")
    group_clusters = []
    for group in groups:
        _reject_unknown_keys(path, group, ("nodes", "device", "inside"), "group.")
        group_clusters.append(_read_uniform_cluster(path, group, cluster_name, network))
    nodes = tuple(node for cluster in group_clusters for node in cluster.nodes)
    notes = tuple(dict.fromkeys(note for cluster in group_clusters for note in cluster.notes))
    if len({node.devices[0].kind for node in nodes}) > 1:
        raise DocumentError(
            f"{path}: groups of processors and of GPUs: ranks are on devices of one kind; leave one out"
        )
    return replace(group_clusters[0], nodes=nodes, network=network if len(nodes) > 1 else None, notes=notes)


def _read_uniform_cluster(
    path: str | Path, document: dict[str, Any], cluster_name: str, network: Interconnect | None
) -> Cluster:
    """Nodes that are alike. A link that the file leaves out is the catalogue's, and a note says so."""
    device_table = document.get("device")
    if not isinstance(device_table, dict) or not isinstance(device_table.get("name"), str):
        raise DocumentError(
            f"{path}: [device] with a name is missing; give one of the catalogue or all of {', '.join(_DEVICE_KEYS)}"
        )
    _reject_unknown_keys(path, device_table, _DEVICE_KEYS, "device.")
    device, catalogue_name = _read_device(path, device_table), _catalogue_name(device_table["name"])
    devices_per_node = _require_positive_int(path, "device.count", device_table.get("count", 1))
    node_count = _require_positive_int(path, "nodes", document.get("nodes", 1))
    intra_node, inter_node, notes = _read_link(path, document, "inside"), network, []
    if (
        intra_node is not None
        and intra_node.domain
        and (intra_node.domain < devices_per_node or intra_node.domain % devices_per_node)
    ):
        raise DocumentError(
            f"{path}: inside.domain={intra_node.domain}: devices that share the link are those of whole nodes, of {devices_per_node} each"
        )
    if intra_node is None and catalogue_name is not None and device.kind == "cuda":
        intra_node = intra_node_link(catalogue_name)
        notes += (
            [_assumed_link_note(path, "inside", intra_node, "device")]
            if intra_node is not None and devices_per_node > 1
            else []
        )
    if inter_node is None and catalogue_name is not None:
        inter_node = inter_node_link(catalogue_name, devices_per_node)
        notes += (
            [_assumed_link_note(path, "between", inter_node, "node")]
            if inter_node is not None and node_count > 1
            else []
        )
    return replace(
        build_cluster(cluster_name, device, devices_per_node, node_count, intra_node=intra_node, inter_node=inter_node),
        notes=tuple(notes),
    )


def _assumed_link_note(path: str | Path, section: str, link: Interconnect, per: str) -> str:
    return f"{path} does not describe [{section}]: taken is {link.kind} of {link.rate / _GIGA:.4g} GB/s per {per} and direction ({link.source})"


def _catalogue_name(name: str) -> str | None:
    """The catalogue's name of a device, None where it has none; of two that it may be the user says which."""
    return resolve_device_name(name) if _matching_device_names(name) else None


def _read_device(path: str | Path, table: dict[str, Any]) -> Device:
    name = _catalogue_name(table["name"])
    if name is not None:
        device = catalogue_device(name)
    else:
        missing = [key for key in _REQUIRED_KEYS if key not in table]
        if missing:
            raise DocumentError(
                f"{path}: device {table['name']} is not in the catalogue, so {', '.join(missing)} must be given"
            )
        placeholder_sheet = DataSheet(peaks={"fp32": 1.0}, vector=1.0, bandwidth=1.0, units=1)
        device = Device(kind="cuda", name=table["name"], memory=1, sheet=placeholder_sheet)
    sheet = device.sheet
    assert sheet is not None
    changes: dict[str, Any] = {
        field: _require_positive_number(path, f"device.{key}", table[key]) * unit
        for key, (field, unit) in _SHEET_KEYS.items()
        if key in table
    }
    if "tflops" in table:
        tflops_by_precision = table["tflops"]
        if not isinstance(tflops_by_precision, dict):
            raise DocumentError(
                f"{path}: device.tflops={tflops_by_precision!r}: a table by precision: {{fp32 = 20, half = 200}}"
            )
        peaks = {
            key: _require_positive_number(path, f"device.tflops.{key}", value) * _TERA
            for key, value in tflops_by_precision.items()
        }
        changes["peaks"] = sheet.peaks | peaks if name is not None else peaks
    changes |= {"units": _require_positive_int(path, "device.units", table["units"])} if "units" in table else {}
    changes |= {"source": _require_text(path, "device.source", table["source"])} if "source" in table else {}
    try:
        device = replace(device, sheet=replace(sheet, **changes))
    except ValueError as error:
        raise DocumentError(f"{path}: [device] {error}") from error
    if "memory_gb" not in table:
        return device
    # A processor's memory is the machine's; of a card's name-plate torch sees most.
    visible_fraction = 1.0 if device.kind == "cpu" else VISIBLE_MEMORY_FRACTION
    memory_gb = _require_positive_number(path, "device.memory_gb", table["memory_gb"])
    if not 1 <= memory_gb <= _MAX_MEMORY_GB:
        raise DocumentError(f"{path}: device.memory_gb={memory_gb:g}: between 1 and {_MAX_MEMORY_GB:,}")
    return replace(device, memory=int(memory_gb * visible_fraction * 2**30))


def _read_link(path: str | Path, document: dict[str, Any], section: str) -> Interconnect | None:
    table = document.get(section)
    if table is None:
        return None
    if not isinstance(table, dict) or not {"kind", "gb_s"} <= set(table):
        raise DocumentError(f"{path}: [{section}] needs kind and gb_s (in each direction)")
    _reject_unknown_keys(path, table, _LINK_KEYS, f"{section}.")
    if table["kind"] not in _LINK_KINDS[section]:
        raise DocumentError(f"{path}: {section}.kind={table['kind']!r}: not one of {', '.join(_LINK_KINDS[section])}")
    try:
        return Interconnect(
            kind=table["kind"],
            rate=_require_positive_number(path, f"{section}.gb_s", table["gb_s"]) * _GIGA,
            domain=_require_positive_int(path, f"{section}.domain", table["domain"]) if "domain" in table else 0,
            share=_require_positive_number(path, f"{section}.share", table["share"]) if "share" in table else None,
            source=_require_text(path, f"{section}.source", table.get("source", str(path))),
        )
    except ValueError as error:
        raise DocumentError(f"{path}: [{section}] {error}") from error


def _require_positive_number(path: str | Path, name: str, value: Any) -> float:
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise DocumentError(f"{path}: {name}={value!r}: a number above 0")
    return float(value)


def _require_text(path: str | Path, name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise DocumentError(f"{path}: {name}={value!r}: a text")
    return value


def _require_positive_int(path: str | Path, name: str, value: Any) -> int:
    if type(value) is not int or value < 1:
        raise DocumentError(f"{path}: {name}={value!r}: an integer of at least 1")
    return value


def _reject_unknown_keys(
    path: str | Path, table: dict[str, Any], allowed_keys: tuple[str, ...], prefix: str = ""
) -> None:
    unknown = [f"{prefix}{key}" for key in table if key not in allowed_keys]
    if unknown:
        raise DocumentError(
            f"{path}: {', '.join(unknown)}: not part of a cluster; known here: {', '.join(allowed_keys)}"
        )
