"""Data sheets of devices and of the machines that they are usually in: the figures of the catalogue, each with its source."""

from __future__ import annotations

#: Share of the peak that `mma` reaches where `wgmma` or its successors are needed for all of it (Luo et al. 2024, "Benchmarking and
#: Dissecting the Nvidia Hopper GPU Architecture": 62 to 63 %; later devices are taken to be alike).
_HOPPER_LEGACY_FRACTION = 0.63

# Figures of products in 2-byte numbers are of both kinds of them; where bf16 has no matrix units its own figure is beside it (computed as fp32).
# name: (memory GB, bandwidth GB/s, multiprocessors, vector fp32, share of the peak with earlier instructions, {precision: TFLOP/s dense}, source)
DEVICES: dict[str, tuple[float, float, int, float, float, dict[str, float], str]] = {
    "P100-16GB": (16, 732, 56, 10.6, 1.0, {"fp32": 10.6, "half": 21.2, "bf16": 10.6}, "NVIDIA Tesla P100 SXM2 data sheet, 2016"),
    "V100-16GB": (16, 900, 80, 15.7, 1.0, {"fp32": 15.7, "half": 125, "bf16": 15.7}, "NVIDIA V100 SXM2 data sheet, 2020"),
    "V100-32GB": (32, 900, 80, 15.7, 1.0, {"fp32": 15.7, "half": 125, "bf16": 15.7}, "NVIDIA V100 SXM2 data sheet, 2020"),
    "A100-40GB": (40, 1555, 108, 19.5, 1.0, {"fp32": 19.5, "tf32": 156, "half": 312}, "NVIDIA A100 SXM data sheet, 2021"),
    "A100-80GB": (80, 2039, 108, 19.5, 1.0, {"fp32": 19.5, "tf32": 156, "half": 312}, "NVIDIA A100 SXM data sheet, 2021"),
    "A800-80GB": (80, 2039, 108, 19.5, 1.0, {"fp32": 19.5, "tf32": 156, "half": 312}, "NVIDIA A800: an A100 with NVLink at 400 GB/s"),
    "H100-80GB": (80, 3350, 132, 66.9, _HOPPER_LEGACY_FRACTION, {"fp32": 66.9, "tf32": 494.7, "half": 989.4, "fp8": 1979}, "NVIDIA H100 SXM5 white paper, 2022"),
    "H100-96GB": (96, 2400, 132, 66.9, _HOPPER_LEGACY_FRACTION, {"fp32": 66.9, "tf32": 494.7, "half": 989.4, "fp8": 1979}, "H100 SXM5 with 96 GB of HBM2e, as torchtitan's clusters have"),
    "H200-141GB": (141, 4800, 132, 66.9, _HOPPER_LEGACY_FRACTION, {"fp32": 66.9, "tf32": 494.7, "half": 989.4, "fp8": 1979}, "NVIDIA H200 SXM data sheet, 2024"),
    "B200-192GB": (180, 8000, 148, 75, _HOPPER_LEGACY_FRACTION, {"fp32": 75, "tf32": 1125, "half": 2250, "fp8": 4500, "fp4": 9000}, "NVIDIA HGX B200 data sheet, 2024, halved for dense"),
    "GB200-192GB": (186, 8000, 148, 80, _HOPPER_LEGACY_FRACTION, {"fp32": 80, "tf32": 1250, "half": 2500, "fp8": 5000, "fp4": 10000}, "NVIDIA GB200 NVL72 data sheet, 2024, halved for dense"),
    "GB300-288GB": (279, 8000, 148, 80, _HOPPER_LEGACY_FRACTION, {"fp32": 80, "tf32": 1250, "half": 2500, "fp8": 5000, "fp4": 15000}, "NVIDIA GB300 NVL72 data sheet, 2025"),
    "MI300X-192GB": (192, 5300, 304, 163.4, 1.0, {"fp32": 163.4, "tf32": 653.7, "half": 1307.4, "fp8": 2614.9}, "AMD Instinct MI300X data sheet, 2023"),
    "L4-24GB": (24, 300, 58, 30.3, 1.0, {"fp32": 30.3, "tf32": 60, "half": 121, "fp8": 242}, "NVIDIA L4 data sheet, 2023, halved for dense"),
    "L40S-48GB": (48, 864, 142, 91.6, 1.0, {"fp32": 91.6, "tf32": 183, "half": 362, "fp8": 733}, "NVIDIA L40S data sheet, 2023"),
    "RTX4090-24GB": (24, 1008, 128, 82.6, 1.0, {"fp32": 82.6, "tf32": 82.6, "half": 165.2, "fp8": 330.3}, "NVIDIA Ada white paper, 2022: fp16 with fp32 accumulation"),
    "RTX5090-32GB": (32, 1792, 170, 104.8, 1.0, {"fp32": 104.8, "tf32": 104.8, "half": 209.5, "fp8": 419, "fp4": 1676}, "NVIDIA Blackwell RTX white paper, 2025: fp32 accumulation"),
}  # fmt: skip

# Processors as one device of all cores of a socket: (memory GB, bandwidth GB/s, cores, fp32 TFLOP/s, half TFLOP/s or 0, what of 2 bytes it computes at
# speed, source)
PROCESSORS: dict[str, tuple[float, float, int, float, float, tuple[str, ...], str]] = {
    "XEON-8380": (512, 204.8, 40, 5.9, 0, (), "Intel ARK: 40 cores at 2.3 GHz, two AVX-512 units, 8 channels of DDR4-3200"),
    "XEON-8480": (512, 307.2, 56, 7.2, 114.7, ("bf16", "fp16"), "Intel ARK: 56 cores at 2.0 GHz, AVX-512 with fp16 and AMX bf16, 8 channels of DDR5-4800"),
    "EPYC-9654": (768, 460.8, 96, 14.7, 29.5, ("bf16",), "AMD EPYC 9654: 96 cores at 2.4 GHz, AVX-512 bf16, 12 channels of DDR5-4800"),
    "GRAVITON3": (128, 307.2, 64, 5.3, 21.3, ("bf16", "fp16"), "AWS c7g.16xlarge: 64 Neoverse-V1 at 2.6 GHz, two 256-bit units, bf16 and fp16, 8 channels of DDR5-4800"),
}  # fmt: skip

# What joins the devices of a node: (kind, GB/s per device and direction, devices that share it beyond a node or 0, source)
INTRA_NODE_LINKS: dict[str, tuple[str, float, int, str]] = {
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

# Usual network of such nodes: (kind, GB/s per node and direction, devices of such a node: fewer have as many of its ports; 0: one port whatever it
# has, source)
INTER_NODE_LINKS: dict[str, tuple[str, float, int, str]] = {
    "P100-16GB": ("infiniband", 50, 8, "DGX-1: four EDR of 100 Gb/s"),
    "V100-16GB": ("infiniband", 50, 8, "DGX-1V: four EDR of 100 Gb/s"),
    "V100-32GB": ("infiniband", 50, 8, "DGX-1V: four EDR of 100 Gb/s"),
    "A100-40GB": ("infiniband", 200, 8, "DGX A100: eight HDR of 200 Gb/s"),
    "A100-80GB": ("infiniband", 200, 8, "DGX A100: eight HDR of 200 Gb/s"),
    "A800-80GB": ("infiniband", 200, 8, "as DGX A100"),
    "H100-80GB": ("infiniband", 400, 8, "DGX H100: eight NDR of 400 Gb/s"),
    "H100-96GB": ("roce", 400, 8, "eight ports of 400 Gb/s"),
    "H200-141GB": ("infiniband", 400, 8, "DGX H200: eight NDR of 400 Gb/s"),
    "B200-192GB": ("infiniband", 400, 8, "DGX B200: eight NDR of 400 Gb/s"),
    "GB200-192GB": ("infiniband", 200, 4, "GB200 compute tray of four GPUs: four NDR of 400 Gb/s"),
    "GB300-288GB": ("infiniband", 400, 4, "GB300 compute tray of four GPUs: four XDR of 800 Gb/s"),
    "MI300X-192GB": ("roce", 400, 8, "eight ports of 400 Gb/s"),
    "L4-24GB": ("ethernet", 12.5, 8, "eight L4 in a node with 100 Gb/s"),
    "L40S-48GB": ("ethernet", 25, 8, "eight L40S in a node with 200 Gb/s"),
    "RTX4090-24GB": ("ethernet", 3.125, 0, "25 Gb/s"),
    "RTX5090-32GB": ("ethernet", 3.125, 0, "25 Gb/s"),
    "XEON-8380": ("ethernet", 3.125, 0, "one port of 25 Gb/s, as such servers usually have"),
    "XEON-8480": ("ethernet", 3.125, 0, "one port of 25 Gb/s, as such servers usually have"),
    "EPYC-9654": ("ethernet", 3.125, 0, "one port of 25 Gb/s, as such servers usually have"),
    "GRAVITON3": ("ethernet", 3.75, 0, "AWS c7g.16xlarge: 30 Gb/s"),
}  # fmt: skip

#: Rated power in watts, from the same data sheets.
RATED_WATTS = {
    "P100-16GB": 300, "V100-16GB": 300, "V100-32GB": 300, "A100-40GB": 400, "A100-80GB": 400, "A800-80GB": 400, "H100-80GB": 700,
    "H100-96GB": 700, "H200-141GB": 700, "B200-192GB": 1000, "GB200-192GB": 1200, "GB300-288GB": 1400, "MI300X-192GB": 750, "L4-24GB": 72,
    "L40S-48GB": 350, "RTX4090-24GB": 450, "RTX5090-32GB": 575,
}  # fmt: skip

#: US dollars for one device for an hour, on demand: an eighth of what AWS lists for a node in us-east-1: p4d.24xlarge 21.958, p4de.24xlarge
#: 27.447, p5.48xlarge 55.04 (all 2026-11-09), p5en.48xlarge 63.296 (2026-08-06). Read from copies of
#: that list in public repositories, not from its own page. Others differ by factors: a file or `--price` gives yours.
HOURLY_PRICES = {"A100-40GB": 2.745, "A100-80GB": 3.431, "H100-80GB": 6.88, "H200-141GB": 7.912}

#: What a name without its memory means where there are several: the 96 GB variant is one operator's.
DEFAULT_VARIANTS = {"H100": "H100-80GB"}
