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
from echelon.plan.cluster import Cluster, Device, Node, Sheet, Wire
from echelon.plan.datasheets import BETWEEN, DEVICES, INSIDE, PRICES, PROCESSORS, USUAL, WATTS

_TERA, _GIGA = 1e12, 1e9
#: Of a card's name-plate memory (in GiB) what torch sees: "80GB" cards show about 79 GiB.
SEEN = 0.99

#: Host cores and memory of a node of GPUs: enough that they do not bind.
_HOST_CORES, _HOST_MEMORY = 96, 2**40
#: Processors that a server of the catalogue takes.
_SOCKETS = 2


def names() -> tuple[str, ...]:
    """Every device that is known by name."""
    return (*DEVICES, *PROCESSORS)


def watts(name: str) -> float:
    """Rated power of a device of the catalogue."""
    if name not in WATTS:
        raise DocumentError(f"{name}: the catalogue knows no rated power of it; it has {', '.join(WATTS)}")
    return WATTS[name]


def resolve(name: str) -> str:
    """The catalogue's name for what begins it: H200 for H200-141GB."""
    found = _begun(name)
    if len(found) > 1:
        raise DocumentError(f"{name}: {' or '.join(found)}? say which")
    if not found:
        raise DocumentError(
            f"{name}: no such device in the catalogue; it has {', '.join(names())}, a TOML file gives any other"
        )
    return found[0]


def _begun(name: str) -> list[str]:
    """The devices that a name, or the beginning of one, may mean."""
    short = name.lower()
    exact = [each for each in names() if each.lower() == short] or [
        full for usual, full in USUAL.items() if usual.lower() == short
    ]
    return exact or [each for each in names() if each.lower().startswith(f"{short}-")]


def device(name: str) -> Device:
    """A device of the catalogue."""
    name = resolve(name)
    price = PRICES.get(name)
    if name in PROCESSORS:
        memory, bandwidth, cores, single, half, quick, source = PROCESSORS[name]
        peaks = {"fp32": single * _TERA} | ({"half": half * _TERA} if half else {})
        sheet = Sheet(
            peaks=peaks, vector=single * _TERA, bandwidth=bandwidth * _GIGA, units=cores, source=source, price=price
        )
        return Device(kind="cpu", name=name, memory=int(memory * 2**30), cores=cores, instructions=quick, sheet=sheet)
    memory, bandwidth, units, vector, legacy, rates, source = DEVICES[name]
    sheet = Sheet(
        peaks={key: value * _TERA for key, value in rates.items()},
        vector=vector * _TERA,
        bandwidth=bandwidth * _GIGA,
        units=units,
        legacy=legacy,
        source=source,
        price=price,
    )
    return Device(kind="cuda", name=name, memory=int(memory * SEEN * 2**30), sheet=sheet)


def cluster(text: str) -> Cluster:
    """`8xH100-80GB` or `4x8xA100-80GB`: nodes, devices in each, name; or the path of a TOML file."""
    if text.endswith(".toml"):
        return from_toml(text)
    match = re.fullmatch(r"(?:(\d+)x)??(?:(\d+)x)?([A-Za-z][\w-]*)", text)
    if match is None:
        raise DocumentError(
            f"{text}: a cluster is written 8xH100-80GB (one node) or 4x8xA100-80GB (four), or is the path of a .toml file"
        )
    name, count = resolve(match[3]), int(match[2] or 1)
    return build(text, device(name), count, int(match[1] or 1), inside=inside(name), between=between(name, count))


def inside(name: str) -> Wire | None:
    """What joins such devices in a node; None: the catalogue does not say."""
    if name not in INSIDE:
        return None
    kind, rate, domain, source = INSIDE[name]
    return Wire(kind=kind, rate=rate * _GIGA, domain=domain, source=source)


def between(name: str, count: int | None = None) -> Wire | None:
    """What usually joins nodes of `count` such devices, each of which brings its ports; None: the catalogue does not say."""
    if name not in BETWEEN:
        return None
    kind, rate, full, source = BETWEEN[name]
    share = min(count / full, 1.0) if full and count else 1.0
    source = source if share == 1 else f"{count} of {full} devices; {source}"
    return Wire(kind=kind, rate=share * rate * _GIGA, source=source)


def build(name: str, device: Device, count: int, nodes: int, *, inside: Wire | None, between: Wire | None) -> Cluster:
    """`nodes` nodes of `count` devices (sockets where they are processors). Links that its ranks will need must be given."""
    if count < 1 or nodes < 1:
        raise DocumentError(f"{name}: {nodes} nodes of {count} devices; both are at least 1")
    if count * nodes > _MOST_DEVICES:
        raise DocumentError(f"{name}: {nodes} nodes of {count} devices; {_MOST_DEVICES:,} devices at most")
    if count > 1 and inside is None and device.kind == "cuda":
        raise DocumentError(
            f"{name}: {count} devices in a node and no link between them; describe it under [inside]: kind, gb_s per device and direction"
        )
    if nodes > 1 and between is None:
        raise DocumentError(
            f"{name}: {nodes} nodes and no link between them; describe it under [between]: kind, gb_s per node and direction"
        )
    if device.kind == "cpu":
        device = _sockets(name, device, count)
        node = Node(name=f"{name} node", cores=device.cores, memory=device.memory, devices=(device,), wire=inside)
    else:
        node = Node(name=f"{name} node", cores=_HOST_CORES, memory=_HOST_MEMORY, devices=(device,) * count, wire=inside)
    return Cluster(name=name, nodes=(node,) * nodes, versions={}, network=between if nodes > 1 else None)


def _sockets(name: str, device: Device, count: int) -> Device:
    """All processors of a server as one device."""
    if count > _SOCKETS:
        raise DocumentError(
            f"{name}: {count} x {device.name}: a server has {_SOCKETS} sockets at most; {count}x1x{device.name} is {count} servers"
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
            peaks={key: count * value for key, value in sheet.peaks.items()},
            vector=count * sheet.vector,
            bandwidth=count * sheet.bandwidth,
            units=count * sheet.units,
            price=None if sheet.price is None else count * sheet.price,
        ),
    )


_FIGURES = {  # key of the file: (field of the sheet, its unit)
    "bandwidth_gb_s": ("bandwidth", _GIGA),
    "vector_tflops": ("vector", _TERA),
    "power": ("power", 1.0),
    "legacy": ("legacy", 1.0),
    "price": ("price", 1.0),
}
_DEVICE_KEYS = ("name", "count", "memory_gb", "units", "tflops", *_FIGURES, "source")
#: What a device that is not in the catalogue needs.
_NEEDED = ("memory_gb", "bandwidth_gb_s", "units", "vector_tflops", "tflops")
_WIRE_KEYS = ("kind", "gb_s", "domain", "share", "source")
#: What links are called: inside, one that ends in mesh joins each pair of devices by wires of its own.
_KINDS = {
    "inside": ("nvswitch", "nvlink-mesh", "xgmi-mesh", "pcie", "other"),
    "between": ("infiniband", "roce", "ethernet", "efa", "slingshot", "omnipath", "other"),
}
#: More devices than any machine has are a slip of the pen.
_MOST_DEVICES, _MOST_MEMORY = 2**20, 2**20


def from_toml(path: str | Path) -> Cluster:
    """The cluster that a TOML file describes."""
    try:
        plain = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise DocumentError(f"{path}: cannot be read as a cluster ({error})") from error
    title = _text(path, "name", plain.get("name", Path(path).stem))
    network = _wire(path, plain, "between")
    if "group" not in plain:
        _known(path, plain, ("name", "nodes", "device", "inside", "between"))
        return _alike(path, plain, title, network)
    _known(path, plain, ("name", "group", "between"))
    groups = plain["group"]
    if not isinstance(groups, list) or not groups or not all(isinstance(each, dict) for each in groups):
        raise DocumentError(f"{path}: [[group]] is a list of groups of nodes, each with a device")
    if network is None and (len(groups) > 1 or groups[0].get("nodes", 1) != 1):
        raise DocumentError(f"{path}: groups of nodes and no link between them; describe it under [between]")
    made = []
    for each in groups:
        _known(path, each, ("nodes", "device", "inside"), "group.")
        made.append(_alike(path, each, title, network))
    nodes = tuple(node for cluster in made for node in cluster.nodes)
    notes = tuple(dict.fromkeys(note for cluster in made for note in cluster.notes))
    if len({node.devices[0].kind for node in nodes}) > 1:
        raise DocumentError(
            f"{path}: groups of processors and of GPUs: ranks are on devices of one kind; leave one out"
        )
    return replace(made[0], nodes=nodes, network=network if len(nodes) > 1 else None, notes=notes)


def _alike(path: str | Path, plain: dict[str, Any], title: str, network: Wire | None) -> Cluster:
    """Nodes that are alike. A link that the file leaves out is the catalogue's, and a note says so."""
    given = plain.get("device")
    if not isinstance(given, dict) or not isinstance(given.get("name"), str):
        raise DocumentError(
            f"{path}: [device] with a name is missing; give one of the catalogue or all of {', '.join(_DEVICE_KEYS)}"
        )
    _known(path, given, _DEVICE_KEYS, "device.")
    made, name = _device(path, given), _catalogued(given["name"])
    count = _whole(path, "device.count", given.get("count", 1))
    nodes = _whole(path, "nodes", plain.get("nodes", 1))
    near, far, notes = _wire(path, plain, "inside"), network, []
    if near is not None and near.domain and (near.domain < count or near.domain % count):
        raise DocumentError(
            f"{path}: inside.domain={near.domain}: devices that share the link are those of whole nodes, of {count} each"
        )
    if near is None and name is not None and made.kind == "cuda":
        near = inside(name)
        notes += [_assumed(path, "inside", near, "device")] if near is not None and count > 1 else []
    if far is None and name is not None:
        far = between(name, count)
        notes += [_assumed(path, "between", far, "node")] if far is not None and nodes > 1 else []
    return replace(build(title, made, count, nodes, inside=near, between=far), notes=tuple(notes))


def _assumed(path: str | Path, link: str, wire: Wire, per: str) -> str:
    return f"{path} does not describe [{link}]: taken is {wire.kind} of {wire.rate / _GIGA:.4g} GB/s per {per} and direction ({wire.source})"


def _catalogued(name: str) -> str | None:
    """The catalogue's name of a device, None where it has none; of two that it may be the user says which."""
    return resolve(name) if _begun(name) else None


def _device(path: str | Path, given: dict[str, Any]) -> Device:
    name = _catalogued(given["name"])
    if name is not None:
        made = device(name)
    else:
        needed = [key for key in _NEEDED if key not in given]
        if needed:
            raise DocumentError(
                f"{path}: device {given['name']} is not in the catalogue, so {', '.join(needed)} must be given"
            )
        blank = Sheet(peaks={"fp32": 1.0}, vector=1.0, bandwidth=1.0, units=1)
        made = Device(kind="cuda", name=given["name"], memory=1, sheet=blank)
    sheet = made.sheet
    assert sheet is not None
    changes: dict[str, Any] = {
        field: _figure(path, f"device.{key}", given[key]) * unit
        for key, (field, unit) in _FIGURES.items()
        if key in given
    }
    if "tflops" in given:
        rates = given["tflops"]
        if not isinstance(rates, dict):
            raise DocumentError(f"{path}: device.tflops={rates!r}: a table by precision: {{fp32 = 20, half = 200}}")
        peaks = {key: _figure(path, f"device.tflops.{key}", value) * _TERA for key, value in rates.items()}
        changes["peaks"] = sheet.peaks | peaks if name is not None else peaks
    changes |= {"units": _whole(path, "device.units", given["units"])} if "units" in given else {}
    changes |= {"source": _text(path, "device.source", given["source"])} if "source" in given else {}
    try:
        made = replace(made, sheet=replace(sheet, **changes))
    except ValueError as error:
        raise DocumentError(f"{path}: [device] {error}") from error
    if "memory_gb" not in given:
        return made
    # A processor's memory is the machine's; of a card's name-plate torch sees most.
    seen = 1.0 if made.kind == "cpu" else SEEN
    memory = _figure(path, "device.memory_gb", given["memory_gb"])
    if not 1 <= memory <= _MOST_MEMORY:
        raise DocumentError(f"{path}: device.memory_gb={memory:g}: between 1 and {_MOST_MEMORY:,}")
    return replace(made, memory=int(memory * seen * 2**30))


def _wire(path: str | Path, plain: dict[str, Any], name: str) -> Wire | None:
    given = plain.get(name)
    if given is None:
        return None
    if not isinstance(given, dict) or not {"kind", "gb_s"} <= set(given):
        raise DocumentError(f"{path}: [{name}] needs kind and gb_s (in each direction)")
    _known(path, given, _WIRE_KEYS, f"{name}.")
    if given["kind"] not in _KINDS[name]:
        raise DocumentError(f"{path}: {name}.kind={given['kind']!r}: not one of {', '.join(_KINDS[name])}")
    try:
        return Wire(
            kind=given["kind"],
            rate=_figure(path, f"{name}.gb_s", given["gb_s"]) * _GIGA,
            domain=_whole(path, f"{name}.domain", given["domain"]) if "domain" in given else 0,
            share=_figure(path, f"{name}.share", given["share"]) if "share" in given else None,
            source=_text(path, f"{name}.source", given.get("source", str(path))),
        )
    except ValueError as error:
        raise DocumentError(f"{path}: [{name}] {error}") from error


def _figure(path: str | Path, name: str, value: Any) -> float:
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise DocumentError(f"{path}: {name}={value!r}: a number above 0")
    return float(value)


def _text(path: str | Path, name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise DocumentError(f"{path}: {name}={value!r}: a text")
    return value


def _whole(path: str | Path, name: str, value: Any) -> int:
    if type(value) is not int or value < 1:
        raise DocumentError(f"{path}: {name}={value!r}: a whole number of at least 1")
    return value


def _known(path: str | Path, given: dict[str, Any], known: tuple[str, ...], prefix: str = "") -> None:
    unknown = [f"{prefix}{key}" for key in given if key not in known]
    if unknown:
        raise DocumentError(f"{path}: {', '.join(unknown)}: not part of a cluster; known here: {', '.join(known)}")
