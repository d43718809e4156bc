"""Devices and machines by name, from their data sheets, and a user's own from a TOML file.

`"4x8xA100-80GB"` is four nodes of eight, `"8xH100-80GB"` one node. A TOML file says the same of anything else:

    name = "ours"
    nodes = 4
    [device]
    name = "H100-80GB"          # of the catalogue; any figure below it replaces the catalogue's
    count = 8                   # per node
    legacy = 0.63               # share of the peak that kernels with matrix instructions of earlier devices reach
    [inside]                    # between the devices of a node
    kind = "nvswitch"
    gb_s = 450                  # per device and direction
    [between]                   # between nodes
    kind = "infiniband"
    gb_s = 400                  # per node and direction

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

import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

from echelon.errors import DocumentError
from echelon.plan.cluster import Cluster, Device, Node, Sheet, Wire

_TERA, _GIGA = 1e12, 1e9
#: Of a card's name-plate memory (in GiB) what torch sees: "80GB" cards show about 79 GiB.
SEEN = 0.99

#: Share of the peak that `mma` reaches where `wgmma` or its successors are needed for all of it (Luo et al. 2024, "Benchmarking and
#: Dissecting the Nvidia Hopper GPU Architecture": 62 to 63 %; later devices are taken to be alike).
_NEW = 0.63

# name: (memory GB, bandwidth GB/s, multiprocessors, vector fp32, share of the peak with earlier instructions, {precision: TFLOP/s dense}, source)
_DEVICES: dict[str, tuple[float, float, int, float, float, dict[str, float], str]] = {
    "P100-16GB": (16, 732, 56, 10.6, 1.0, {"fp32": 10.6, "half": 21.2}, "NVIDIA Tesla P100 SXM2 data sheet, 2016"),
    "V100-16GB": (16, 900, 80, 15.7, 1.0, {"fp32": 15.7, "half": 125}, "NVIDIA V100 SXM2 data sheet, 2020"),
    "V100-32GB": (32, 900, 80, 15.7, 1.0, {"fp32": 15.7, "half": 125}, "NVIDIA V100 SXM2 data sheet, 2020"),
    "A100-40GB": (40, 1555, 108, 19.5, 1.0, {"fp32": 19.5, "tf32": 156, "half": 312}, "NVIDIA A100 SXM data sheet, 2021"),
    "A100-80GB": (80, 2039, 108, 19.5, 1.0, {"fp32": 19.5, "tf32": 156, "half": 312}, "NVIDIA A100 SXM data sheet, 2021"),
    "A800-80GB": (80, 2039, 108, 19.5, 1.0, {"fp32": 19.5, "tf32": 156, "half": 312}, "NVIDIA A800: an A100 with NVLink at 400 GB/s"),
    "H100-80GB": (80, 3350, 132, 66.9, _NEW, {"fp32": 66.9, "tf32": 494.7, "half": 989.4, "fp8": 1979}, "NVIDIA H100 SXM5 white paper, 2022"),
    "H100-96GB": (96, 2400, 132, 66.9, _NEW, {"fp32": 66.9, "tf32": 494.7, "half": 989.4, "fp8": 1979}, "H100 SXM5 with 96 GB of HBM2e, as torchtitan's clusters have"),
    "H200-141GB": (141, 4800, 132, 66.9, _NEW, {"fp32": 66.9, "tf32": 494.7, "half": 989.4, "fp8": 1979}, "NVIDIA H200 SXM data sheet, 2024"),
    "B200-192GB": (180, 8000, 148, 75, _NEW, {"fp32": 75, "tf32": 1125, "half": 2250, "fp8": 4500, "fp4": 9000}, "NVIDIA HGX B200 data sheet, 2024, halved for dense"),
    "GB200-192GB": (186, 8000, 148, 80, _NEW, {"fp32": 80, "tf32": 1250, "half": 2500, "fp8": 5000, "fp4": 10000}, "NVIDIA GB200 NVL72 data sheet, 2024, halved for dense"),
    "GB300-288GB": (279, 8000, 148, 80, _NEW, {"fp32": 80, "tf32": 1250, "half": 2500, "fp8": 5000, "fp4": 15000}, "NVIDIA GB300 NVL72 data sheet, 2025"),
    "MI300X-192GB": (192, 5300, 304, 163.4, 1.0, {"fp32": 163.4, "tf32": 653.7, "half": 1307.4, "fp8": 2614.9}, "AMD Instinct MI300X data sheet, 2023"),
    "L4-24GB": (24, 300, 58, 30.3, 1.0, {"fp32": 30.3, "tf32": 60, "half": 121, "fp8": 242}, "NVIDIA L4 data sheet, 2023, halved for dense"),
    "L40S-48GB": (48, 864, 142, 91.6, 1.0, {"fp32": 91.6, "tf32": 183, "half": 362, "fp8": 733}, "NVIDIA L40S data sheet, 2023"),
    "RTX4090-24GB": (24, 1008, 128, 82.6, 1.0, {"fp32": 82.6, "tf32": 82.6, "half": 165.2, "fp8": 330.3}, "NVIDIA Ada white paper, 2022: fp16 with fp32 accumulation"),
    "RTX5090-32GB": (32, 1792, 170, 104.8, 1.0, {"fp32": 104.8, "tf32": 104.8, "half": 209.5, "fp8": 419, "fp4": 1676}, "NVIDIA Blackwell RTX white paper, 2025: fp32 accumulation"),
}  # fmt: skip

# Processors as one device of all cores: (memory GB, bandwidth GB/s, cores, fp32 TFLOP/s, half TFLOP/s or 0, source)
_PROCESSORS: dict[str, tuple[float, float, int, float, float, str]] = {
    "XEON-8380": (512, 204.8, 40, 5.9, 0, "Intel ARK: 40 cores at 2.3 GHz, two AVX-512 units, 8 channels of DDR4-3200"),
    "XEON-8480": (512, 307.2, 56, 7.2, 114.7, "Intel ARK: 56 cores at 2.0 GHz, AVX-512 and AMX bf16, 8 channels of DDR5-4800"),
    "EPYC-9654": (768, 460.8, 96, 14.7, 29.5, "AMD EPYC 9654: 96 cores at 2.4 GHz, AVX-512 bf16, 12 channels of DDR5-4800"),
    "GRAVITON3": (128, 307.2, 64, 5.3, 21.3, "AWS c7g.16xlarge: 64 Neoverse-V1 at 2.6 GHz, two 256-bit units, bf16, 8 channels of DDR5-4800"),
}  # fmt: skip

# What joins the devices of a node: (kind, GB/s per device and direction, devices that share it beyond a node or 0, source)
_INSIDE: dict[str, tuple[str, float, int, str]] = {
    "P100-16GB": ("nvlink-mesh", 80, 0, "DGX-1: four NVLink 1 of 20 GB/s each way"),
    "V100-16GB": ("nvlink-mesh", 150, 0, "DGX-1V: six NVLink 2 of 25 GB/s each way"),
    "V100-32GB": ("nvlink-mesh", 150, 0, "DGX-1V: six NVLink 2 of 25 GB/s each way"),
    "A100-40GB": ("nvswitch", 300, 0, "DGX A100: twelve NVLink 3 of 25 GB/s each way"),
    "A100-80GB": ("nvswitch", 300, 0, "DGX A100: twelve NVLink 3 of 25 GB/s each way"),
    "A800-80GB": ("nvswitch", 200, 0, "NVIDIA A800: eight NVLink 3"),
    "H100-80GB": ("nvswitch", 450, 0, "DGX H100: eighteen NVLink 4 of 25 GB/s each way"),
    "H100-96GB": ("nvswitch", 450, 0, "eighteen NVLink 4 of 25 GB/s each way"),
    "H200-141GB": ("nvswitch", 450, 0, "HGX H200: eighteen NVLink 4 of 25 GB/s each way"),
    "B200-192GB": ("nvswitch", 900, 0, "HGX B200: NVLink 5, 1.8 TB/s both ways"),
    "GB200-192GB": ("nvswitch", 900, 72, "GB200 NVL72: one NVLink 5 domain of 72"),
    "GB300-288GB": ("nvswitch", 900, 72, "GB300 NVL72: one NVLink 5 domain of 72"),
    "MI300X-192GB": ("xgmi-mesh", 448, 0, "seven links of 64 GB/s each way"),
    "L4-24GB": ("pcie", 32, 0, "PCIe 4.0 x16"),
    "L40S-48GB": ("pcie", 32, 0, "PCIe 4.0 x16"),
    "RTX4090-24GB": ("pcie", 32, 0, "PCIe 4.0 x16, no peer access: through the host"),
    "RTX5090-32GB": ("pcie", 64, 0, "PCIe 5.0 x16, no peer access: through the host"),
}  # fmt: skip

# Usual network of such nodes: (kind, GB/s per node and direction, source)
_BETWEEN: dict[str, tuple[str, float, str]] = {
    "P100-16GB": ("infiniband", 50, "DGX-1: four EDR of 100 Gb/s"),
    "V100-16GB": ("infiniband", 50, "DGX-1V: four EDR of 100 Gb/s"),
    "V100-32GB": ("infiniband", 50, "DGX-1V: four EDR of 100 Gb/s"),
    "A100-40GB": ("infiniband", 200, "DGX A100: eight HDR of 200 Gb/s"),
    "A100-80GB": ("infiniband", 200, "DGX A100: eight HDR of 200 Gb/s"),
    "A800-80GB": ("infiniband", 200, "as DGX A100"),
    "H100-80GB": ("infiniband", 400, "DGX H100: eight NDR of 400 Gb/s"),
    "H100-96GB": ("roce", 400, "eight ports of 400 Gb/s"),
    "H200-141GB": ("infiniband", 400, "DGX H200: eight NDR of 400 Gb/s"),
    "B200-192GB": ("infiniband", 400, "DGX B200: eight NDR of 400 Gb/s"),
    "GB200-192GB": ("infiniband", 200, "GB200 compute tray of four GPUs: four NDR of 400 Gb/s"),
    "GB300-288GB": ("infiniband", 400, "GB300 compute tray of four GPUs: four XDR of 800 Gb/s"),
    "MI300X-192GB": ("roce", 400, "eight ports of 400 Gb/s"),
    "L4-24GB": ("ethernet", 12.5, "100 Gb/s"),
    "L40S-48GB": ("ethernet", 25, "200 Gb/s"),
    "RTX4090-24GB": ("ethernet", 3.125, "25 Gb/s"),
    "RTX5090-32GB": ("ethernet", 3.125, "25 Gb/s"),
}  # fmt: skip

#: Rated power in watts, from the same data sheets.
_WATTS = {
    "P100-16GB": 300, "V100-16GB": 300, "V100-32GB": 300, "A100-40GB": 400, "A100-80GB": 400, "A800-80GB": 400, "H100-80GB": 700,
    "H100-96GB": 700, "H200-141GB": 700, "B200-192GB": 1000, "GB200-192GB": 1200, "GB300-288GB": 1400, "MI300X-192GB": 750, "L4-24GB": 72,
    "L40S-48GB": 350, "RTX4090-24GB": 450, "RTX5090-32GB": 575,
}  # fmt: skip

#: Host cores and memory of a node of GPUs: enough that they do not bind.
_HOST_CORES, _HOST_MEMORY = 96, 2**40


def names() -> tuple[str, ...]:
    """Every device that is known by name."""
    return (*_DEVICES, *_PROCESSORS)


def watts(name: str) -> float:
    """Rated power of a device of the catalogue."""
    if name not in _WATTS:
        raise DocumentError(f"{name}: the catalogue knows no rated power of it; it has {', '.join(_WATTS)}")
    return _WATTS[name]


def device(name: str) -> Device:
    """A device of the catalogue."""
    if name in _PROCESSORS:
        memory, bandwidth, cores, single, half, source = _PROCESSORS[name]
        peaks = {"fp32": single * _TERA} | ({"half": half * _TERA} if half else {})
        sheet = Sheet(peaks=peaks, vector=single * _TERA, bandwidth=bandwidth * _GIGA, units=cores, source=source)
        return Device(kind="cpu", name=name, memory=int(memory * 2**30), cores=cores, sheet=sheet)
    if name not in _DEVICES:
        raise DocumentError(
            f"{name}: no such device in the catalogue; it has {', '.join(names())}, a TOML file gives any other"
        )
    memory, bandwidth, units, vector, legacy, rates, source = _DEVICES[name]
    sheet = Sheet(
        peaks={key: value * _TERA for key, value in rates.items()},
        vector=vector * _TERA,
        bandwidth=bandwidth * _GIGA,
        units=units,
        legacy=legacy,
        source=source,
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
    name = match[3]
    return build(text, device(name), int(match[2] or 1), int(match[1] or 1), inside=inside(name), between=between(name))


def inside(name: str) -> Wire | None:
    """What joins such devices in a node; None: the catalogue does not say."""
    if name not in _INSIDE:
        return None
    kind, rate, domain, source = _INSIDE[name]
    return Wire(kind=kind, rate=rate * _GIGA, domain=domain, source=source)


def between(name: str) -> Wire | None:
    """What usually joins nodes of such devices; None: the catalogue does not say."""
    if name not in _BETWEEN:
        return None
    kind, rate, source = _BETWEEN[name]
    return Wire(kind=kind, rate=rate * _GIGA, source=source)


def build(name: str, device: Device, count: int, nodes: int, *, inside: Wire | None, between: Wire | None) -> Cluster:
    """`nodes` nodes of `count` devices. Links that its ranks will need must be given."""
    if count < 1 or nodes < 1:
        raise DocumentError(f"{name}: {nodes} nodes of {count} devices; both are at least 1")
    if count > 1 and inside is None and device.kind == "cuda":
        raise DocumentError(
            f"{name}: {count} devices in a node and no link between them; describe it under [inside]: kind, gb_s per device and direction"
        )
    if nodes > 1 and between is None:
        raise DocumentError(
            f"{name}: {nodes} nodes and no link between them; describe it under [between]: kind, gb_s per node and direction"
        )
    if device.kind == "cpu":
        node = Node(name=f"{name} node", cores=device.cores, memory=device.memory, devices=(device,), wire=inside)
    else:
        node = Node(name=f"{name} node", cores=_HOST_CORES, memory=_HOST_MEMORY, devices=(device,) * count, wire=inside)
    return Cluster(name=name, nodes=(node,) * nodes, versions={}, network=between if nodes > 1 else None)


_DEVICE_KEYS = (
    "name",
    "count",
    "memory_gb",
    "bandwidth_gb_s",
    "units",
    "vector_tflops",
    "tflops",
    "power",
    "legacy",
    "source",
)
_WIRE_KEYS = ("kind", "gb_s", "domain", "share", "source")


def from_toml(path: str | Path) -> Cluster:
    """The cluster that a TOML file describes."""
    try:
        plain = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise DocumentError(f"{path}: cannot be read as a cluster ({error})") from error
    if "group" not in plain:
        _known(path, plain, ("name", "nodes", "device", "inside", "between"))
        return _alike(path, plain, str(plain.get("name", Path(path).stem)))
    _known(path, plain, ("name", "group", "between"))
    groups = plain["group"]
    if not isinstance(groups, list) or not groups or not all(isinstance(each, dict) for each in groups):
        raise DocumentError(f"{path}: [[group]] is a list of groups of nodes, each with a device")
    made = []
    for each in groups:
        _known(path, each, ("nodes", "device", "inside"), "group.")
        made.append(_alike(path, each | {"between": plain.get("between")}, str(plain.get("name", Path(path).stem))))
    nodes = tuple(node for cluster in made for node in cluster.nodes)
    network = _wire(path, plain, "between")
    if network is None and len(nodes) > 1:
        raise DocumentError(f"{path}: groups of nodes and no link between them; describe it under [between]")
    return replace(made[0], nodes=nodes, network=network)


def _alike(path: str | Path, plain: dict[str, Any], title: str) -> Cluster:
    """Nodes that are alike."""
    given = plain.get("device")
    if not isinstance(given, dict) or "name" not in given:
        raise DocumentError(
            f"{path}: [device] with a name is missing; give one of the catalogue or all of {', '.join(_DEVICE_KEYS)}"
        )
    _known(path, given, _DEVICE_KEYS, "device.")
    name = given["name"]
    return build(
        title,
        _device(path, given),
        _whole(path, "device.count", given.get("count", 1)),
        _whole(path, "nodes", plain.get("nodes", 1)),
        inside=_wire(path, plain, "inside") or inside(name),
        between=_wire(path, plain, "between") or between(name),
    )


def _device(path: str | Path, given: dict[str, Any]) -> Device:
    try:
        if given["name"] in names():
            made = device(given["name"])
        else:
            needed = [
                key for key in ("memory_gb", "bandwidth_gb_s", "units", "vector_tflops", "tflops") if key not in given
            ]
            if needed:
                raise DocumentError(
                    f"{path}: device {given['name']} is not in the catalogue, so {', '.join(needed)} must be given"
                )
            peaks = {key: float(value) * _TERA for key, value in given["tflops"].items()}
            sheet = Sheet(peaks=peaks, vector=1.0, bandwidth=1.0, units=1)
            made = Device(kind="cuda", name=given["name"], memory=1, sheet=sheet)
        assert made.sheet is not None
        sheet = made.sheet
        if "tflops" in given:
            sheet = replace(
                sheet, peaks=sheet.peaks | {key: float(value) * _TERA for key, value in given["tflops"].items()}
            )
        changes: dict[str, Any] = {
            field: float(given[key]) * scale
            for key, field, scale in (
                ("bandwidth_gb_s", "bandwidth", _GIGA),
                ("vector_tflops", "vector", _TERA),
                ("power", "power", 1.0),
                ("legacy", "legacy", 1.0),
            )
            if key in given
        }
        changes |= {"units": int(given["units"])} if "units" in given else {}
        changes |= {"source": str(given["source"])} if "source" in given else {}
        made = replace(made, sheet=replace(sheet, **changes))
        return replace(made, memory=int(float(given["memory_gb"]) * SEEN * 2**30)) if "memory_gb" in given else made
    except (TypeError, ValueError, AttributeError) as error:
        raise DocumentError(f"{path}: [device] {error}") from error


def _wire(path: str | Path, plain: dict[str, Any], name: str) -> Wire | None:
    given = plain.get(name)
    if given is None:
        return None
    if not isinstance(given, dict) or not {"kind", "gb_s"} <= set(given):
        raise DocumentError(f"{path}: [{name}] needs kind and gb_s (in each direction)")
    _known(path, given, _WIRE_KEYS, f"{name}.")
    try:
        return Wire(
            kind=str(given["kind"]),
            rate=float(given["gb_s"]) * _GIGA,
            domain=int(given.get("domain", 0)),
            share=float(given["share"]) if "share" in given else None,
            source=str(given.get("source", path)),
        )
    except (TypeError, ValueError) as error:
        raise DocumentError(f"{path}: [{name}] {error}") from error


def _whole(path: str | Path, name: str, value: Any) -> int:
    if type(value) is not int or value < 1:
        raise DocumentError(f"{path}: {name}={value!r}: a whole number of at least 1")
    return value


def _known(path: str | Path, given: dict[str, Any], known: tuple[str, ...], prefix: str = "") -> None:
    unknown = [f"{prefix}{key}" for key in given if key not in known]
    if unknown:
        raise DocumentError(f"{path}: {', '.join(unknown)}: not part of a cluster; known here: {', '.join(known)}")
