"""A small packed data set with columns of every kind, and ways to read it that say whether what they gave was right."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from echelon.data import Loader, Packed, open_source
from echelon.data.packed.from_samples import SamplePackingSource
from echelon.data.packed.inspect import find_damage
from echelon.data.packed.pack import pack
from echelon.errors import DataError

#: A sample in a form that can be compared: the bytes of its pixels and tokens, its name, its label.
Plain = tuple[bytes, bytes, str, int]


def samples(count: int) -> list[dict[str, Any]]:
    """Pixels and up to 5 KB of tokens each: a block of 16 rows has whole tables for the checksum's sums, and bytes that fill none."""
    draw = np.random.default_rng(7)
    return [
        {
            "pixels": draw.integers(0, 256, (3, 24, 24), dtype=np.uint8),
            "tokens": draw.integers(0, 1000, 37 * number % 641).tolist(),
            "name": f"sample {number}",
            "label": number,
        }
        for number in range(count)
    ]


def make(folder: Path, count: int = 120, shards: int = 3) -> list[Plain]:
    """Pack samples, several blocks in each file; returns what reading must give."""
    rows = samples(count)
    origin = SamplePackingSource(rows, {"source": "made for a test"})
    origin.row_bytes = 2**15  # as if rows were larger: 16 of them make a block
    pack(origin, folder, shards=shards)
    tokens = [np.array(row["tokens"], np.int64).tobytes() for row in rows]
    return [(row["pixels"].tobytes(), each, row["name"], row["label"]) for row, each in zip(rows, tokens, strict=True)]


def plain(sample: Any) -> Plain:
    """A sample as it was read."""
    pixels, tokens = sample["pixels"].numpy().tobytes(), sample["tokens"].numpy().tobytes()
    return pixels, tokens, sample["name"], sample["label"].item()


def everything(folder: str | Path, right: list[Plain], **how: Any) -> bool:
    """Sample by sample."""
    data = Packed(folder, **how)
    return [plain(sample) for sample in data.__getitems__(range(len(data)))] == right


def batches(folder: str | Path, right: list[Plain], **how: Any) -> bool:
    """An epoch of a training, which pads the tokens."""
    source = open_source(Packed(folder, pad=0, **how))
    order = source.make_order(batch=12, seed=3)
    seen = []
    for step in Loader(source, order, dp_rank=0, dp_size=1, micro_batch_size=5).steps(0, order.steps_per_epoch):
        for micro in step.micro_batches:
            for place in range(micro.samples):
                pixels, tokens, name, label = (micro.batch[key][place] for key in ("pixels", "tokens", "name", "label"))
                wanted = right[int(label)] if 0 <= int(label) < len(right) else None
                if wanted is None or name != wanted[2] or pixels.numpy().tobytes() != wanted[0]:
                    return False
                content = tokens.numpy().tobytes()
                if not content.startswith(wanted[1]) or any(content[len(wanted[1]) :]):
                    return False
                seen.append(int(label))
    return sorted(seen) == list(range(len(right)))


def lengths(folder: str | Path, right: list[Plain], **how: Any) -> bool:
    """The lengths alone."""
    return Packed(folder, **how).lengths("tokens").tolist() == [len(each[1]) // 8 for each in right]


def skipping(folder: str | Path, right: list[Plain], **how: Any) -> bool:
    """Without what is damaged: all others are there, each as it was, and as many are missing as is said."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data = Packed(folder, damaged="skip", **how)
    found = [plain(sample) for sample in data.__getitems__(range(len(data)))]
    labels = [each[3] for each in found]
    return (
        labels == sorted({*labels} & {*range(len(right))})
        and found == [right[label] for label in labels]
        and len(found) + data.skipped == len(right)
    )


def verified(folder: str | Path, right: list[Plain], **how: Any) -> bool:
    """`echelon data verify` finds something wrong, or all samples are as they were."""
    return bool(list(find_damage(str(folder)))) or everything(folder, right, **how)


WAYS: dict[str, Callable[..., bool]] = {
    "everything": everything, "batches": batches, "lengths": lengths, "skipping": skipping, "verified": verified,
}  # fmt: skip


def outcome(way: str, folder: str | Path, right: list[Plain], **how: Any) -> str:
    """`right`: what it gave is as it was; `named`: an error that names a file of the folder; anything else is a fault."""
    try:
        return "right" if WAYS[way](folder, right, **how) else "wrong data"
    except DataError as error:
        return "named" if str(folder) in str(error) else f"unnamed: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
