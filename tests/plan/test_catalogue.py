"""Clusters by name and from TOML: every device has what a forecast needs, and what is wrong is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.errors import DocumentError
from echelon.plan import catalogue
from echelon.plan.cluster import Cluster


@pytest.mark.parametrize("name", catalogue.device_names())
def test_every_device_has_a_sheet_with_its_source(name: str) -> None:
    device = catalogue.catalogue_device(name)
    assert device.sheet is not None
    assert device.sheet.source
    assert device.memory > 2**33
    assert device.sheet.peak_flops("fp8") >= device.sheet.peak_flops("half") >= device.sheet.peak_flops("fp32")
    if device.kind == "cuda":
        assert catalogue.intra_node_link(name) is not None
        assert catalogue.inter_node_link(name) is not None
        assert catalogue.rated_watts(name) > 0


@pytest.mark.parametrize(
    ("text", "nodes", "devices"), [("H100-80GB", 1, 1), ("8xH100-80GB", 1, 8), ("4x8xA100-80GB", 4, 8)]
)
def test_the_short_form_says_nodes_and_devices(text: str, nodes: int, devices: int) -> None:
    cluster = catalogue.parse_cluster(text)
    assert (len(cluster.nodes), len(cluster.nodes[0].devices)) == (nodes, devices)
    assert (cluster.network is not None) is (nodes > 1)
    assert Cluster.from_json(cluster.to_json()) == cluster


def write(folder: Path, text: str) -> Path:
    path = folder / "ours.toml"
    path.write_text(text)
    return path


def test_a_toml_file_gives_any_other_cluster(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
        nodes = 2
        [device]
        name = "X1"
        count = 4
        memory_gb = 64
        bandwidth_gb_s = 1000
        units = 64
        vector_tflops = 20
        tflops = {fp32 = 20, half = 200}
        [inside]
        kind = "nvlink-mesh"
        gb_s = 100
        [between]
        kind = "roce"
        gb_s = 50
        """,
    )
    cluster = catalogue.parse_cluster(str(path))
    device = cluster.nodes[0].devices[0]
    assert device.sheet is not None
    assert device.sheet.peaks == {"fp32": 20e12, "half": 200e12}
    assert device.sheet.bandwidth == 1e12
    assert cluster.network is not None
    assert cluster.network.rate == 50e9
    assert len(cluster.nodes) == 2


def test_a_figure_in_the_file_replaces_the_catalogues(tmp_path: Path) -> None:
    path = write(tmp_path, '[device]\nname = "H100-80GB"\ncount = 8\npower = 0.7\nbandwidth_gb_s = 2000\n')
    sheet = catalogue.load_cluster_toml(path).nodes[0].devices[0].sheet
    assert sheet is not None
    assert (sheet.power, sheet.bandwidth, sheet.peaks["half"]) == (0.7, 2e12, 989.4e12)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nodes = 2", r"needs either \[device\]"),
        ('[device]\nname = "X1"', "is not in the catalogue and needs memory_gb"),
        ('[device]\nname = "H100-80GB"\nspeed = 3', "device: unknown field speed"),
        ('nodes = 0\n[device]\nname = "H100-80GB"', "0 nodes of 1 devices; at least 1 of both"),
        ('[device]\nname = "H100-80GB"\n[inside]\nkind = "x"', "inside: missing field gb_s"),
        (
            '[device]\nname = "X"\ncount = 2\nmemory_gb = 1\nbandwidth_gb_s = 1\nunits = 1\nvector_tflops = 1\ntflops = {fp32 = 1}',
            r"no link between them; describe it under \[inside\]",
        ),
        ("nodes = ", "cannot be read as a cluster"),
        ('[device]\nname = "H100-80GB"\npower = 3.0', r"\[device\] power=3.0: a share is at most 1"),
        ('[device]\nname = "H100-80GB"\nprice = -1', "price=-1.0: a data sheet"),
        ('[device]\nname = "H100-80GB"\nunits = 1.5', "device.units: expected int, found 1.5"),
        ('[device]\nname = "H100-80GB"\nmemory_gb = true', "device.memory_gb: expected float, found True"),
        ('[device]\nname = "H100-80GB"\ntflops = {half = inf}', "device.tflops.half: expected float, found inf"),
        ('[device]\nname = "H100-80GB"\ntflops = {int8 = 1}', "int8: not a precision"),
        ('[device]\nname = "H100-80GB"\nmemory_gb = 1e300', "memory_gb=1e[+]300 is not between 1 and"),
        ('[device]\nname = "H100-80GB"\nsource = 5', "device.source: expected str, found 5"),
        ('nodes = 1000000000000\n[device]\nname = "H100-80GB"', "1,048,576 devices at most"),
        (
            '[device]\nname = "H100-80GB"\ncount = 4\n[inside]\nkind = "nvswitch"\ngb_s = 1\ndomain = 3',
            "inside.domain=3: the devices that share",
        ),
        (
            '[device]\nname = "H100-80GB"\ncount = 4\n[inside]\nkind = "pigeon"\ngb_s = 1',
            "inside.kind='pigeon': not one of nvswitch",
        ),
        ('[device]\nname = "A100"', "A100-40GB or A100-80GB"),
        (
            'nodes = 2\n[device]\nname = "H100"\n[between]\nkind = "roce"\ngb_s = nan',
            "between.gb_s: expected float, found nan",
        ),
        (
            'nodes = 2\n[device]\nname = "H100"\n[between]\nkind = "roce"\ngb_s = 1\nshare = 2',
            "share=2.0 of the rate is above 0",
        ),
        (
            'nodes = 2\n[device]\nname = "X"\nmemory_gb = 1\nbandwidth_gb_s = 1\nunits = 1\nvector_tflops = 1\ntflops = {fp32 = 1}',
            r"no link between them; describe it under \[between\]",
        ),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(DocumentError, match=said):
        catalogue.load_cluster_toml(write(tmp_path, text))


def test_unknown_names_are_answered_with_the_known_ones() -> None:
    with pytest.raises(DocumentError, match="no such device in the catalogue; it has P100"):
        catalogue.parse_cluster("8xK80")
    with pytest.raises(DocumentError, match="a cluster is written 8xH100-80GB"):
        catalogue.parse_cluster("8 H100")


def test_a_file_may_have_groups_of_nodes_that_are_not_alike(tmp_path: Path) -> None:
    groups = """
    name = "both"
    [[group]]
    nodes = 2
    device = { name = "H100-80GB", count = 8 }
    [[group]]
    device = { name = "A100-80GB", count = 4, legacy = 0.9 }
    """
    between = """
    [between]
    kind = "infiniband"
    gb_s = 100
    """
    cluster = catalogue.parse_cluster(str(write(tmp_path, groups + between)))
    assert [(node.devices[0].name, len(node.devices)) for node in cluster.nodes] == [("H100-80GB", 8)] * 2 + [
        ("A100-80GB", 4)
    ]
    assert cluster.network is not None
    assert cluster.network.rate == 100e9
    sheets = [node.devices[0].sheet for node in cluster.nodes]
    assert [sheet.legacy for sheet in sheets if sheet is not None] == [0.63, 0.63, 0.9]
    with pytest.raises(DocumentError, match="no link between them"):
        catalogue.parse_cluster(str(write(tmp_path, groups)))
    with pytest.raises(DocumentError, match=r"group\[0\]: unknown field count"):
        catalogue.parse_cluster(str(write(tmp_path, groups.replace("nodes = 2", "count = 2") + between)))


def test_links_that_a_file_leaves_out_are_the_catalogues_and_a_note_says_so(tmp_path: Path) -> None:
    cluster = catalogue.load_cluster_toml(write(tmp_path, 'nodes = 16\n[device]\nname = "H100-80GB"\ncount = 4'))
    assert cluster.network is not None
    assert cluster.network.rate == 200e9  # four of the eight ports that eight devices have
    inside, between = cluster.notes
    assert "does not describe [inside]: assuming nvswitch of 450 GB/s per device" in inside
    assert "does not describe [between]: assuming infiniband of 200 GB/s per node" in between
    alone = catalogue.load_cluster_toml(write(tmp_path, '[device]\nname = "H100-80GB"'))
    assert alone.notes == ()
    given = '\n[inside]\nkind = "nvswitch"\ngb_s = 450\n[between]\nkind = "roce"\ngb_s = 50'
    full = catalogue.load_cluster_toml(write(tmp_path, f'nodes = 2\n[device]\nname = "H100-80GB"\ncount = 4{given}'))
    assert full.notes == ()


@pytest.mark.parametrize(
    ("text", "rate"),
    [("64x1xA100-80GB", 25e9), ("2x8xA100-80GB", 200e9), ("2x4xGB200-192GB", 200e9), ("2x1xRTX4090", 3.125e9)],
)
def test_nodes_of_few_devices_have_few_ports(text: str, rate: float) -> None:
    cluster = catalogue.parse_cluster(text)
    assert cluster.network is not None
    assert cluster.network.rate == rate


@pytest.mark.parametrize(
    ("short", "name"), [("H100", "H100-80GB"), ("h200", "H200-141GB"), ("RTX4090", "RTX4090-24GB")]
)
def test_a_name_that_begins_one_will_do(short: str, name: str) -> None:
    assert catalogue.parse_cluster(f"8x{short}").nodes[0].devices[0].name == name


def test_sockets_of_a_server_are_one_device_and_servers_have_a_network() -> None:
    one, two = (catalogue.parse_cluster(text).nodes[0].devices for text in ("XEON-8480", "2xXEON-8480"))
    assert (len(two), two[0].cores, two[0].memory) == (1, 2 * one[0].cores, 2 * one[0].memory)
    assert catalogue.parse_cluster("8x1xXEON-8480").network is not None
    with pytest.raises(DocumentError, match="8x1xXEON-8380 is 8 servers"):
        catalogue.parse_cluster("8xXEON-8380")


def test_numbers_of_two_bytes_that_a_device_has_no_units_for_are_no_faster() -> None:
    old, new = (catalogue.catalogue_device(name).sheet for name in ("V100-32GB", "A100-80GB"))
    assert old is not None
    assert new is not None
    assert old.peak_flops("bf16") == old.peak_flops("fp32") < old.peak_flops("half")
    assert new.peak_flops("bf16") == new.peak_flops("half")
    assert [catalogue.catalogue_device(name).instructions for name in ("XEON-8380", "XEON-8480")] == [
        (),
        ("bf16", "fp16"),
    ]
