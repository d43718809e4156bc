"""A folder of pictures, one folder per class: samples are (image, label)."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from echelon.data.packed.manifest import Column
from echelon.data.packed.packing_source import Origin, stamp
from echelon.errors import DataError

ENDINGS = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}


class Pictures(Origin):
    """Sorted by class. The pictures as their files hold them, or, with `size` (height, width), decoded and resized to uint8[3, height, width]."""

    def __init__(self, folder: Path, size: tuple[int, int] | None) -> None:
        classes = sorted(path.name for path in folder.iterdir() if path.is_dir())
        self._files = [
            (path, label)
            for label, name in enumerate(classes)
            for path in sorted((folder / name).rglob("*"))
            if path.suffix.lower() in ENDINGS and path.is_file()
        ]
        if not self._files:
            raise DataError(f"{folder} has no pictures in folders of their classes ({', '.join(sorted(ENDINGS))})")
        self._size = size
        self.samples, self.sample = len(self._files), {"tuple": ["image", "label"]}
        image = (
            Column(name="image", dtype="uint8", ragged=True, kind="image")
            if size is None
            else Column(name="image", dtype="uint8", shape=(3, *size))
        )
        self.columns = image, Column(name="label", dtype="int64")
        paths = [path for path, _ in self._files]
        self.row_bytes = 8 + float(np.mean([path.stat().st_size for path in paths]) if size is None else image.item)
        self.provenance = {
            "source": str(folder), "kind": "image folder", "classes": json.dumps(classes), "stamp": stamp(paths),
            "size": "as it is" if size is None else f"{size[0]}x{size[1]}",
        }  # fmt: skip

    def read(self, start: int, stop: int) -> Sequence[Any]:
        chosen = self._files[start:stop]
        labels = np.array([label for _, label in chosen], np.int64)
        raw = []
        for path, _ in chosen:
            content = path.read_bytes()
            pixels = decoded(content, str(path), self._size)  # also where it stays encoded: a broken one is told of now
            raw.append(np.frombuffer(content, np.uint8) if self._size is None else pixels)
        return [raw if self._size is None else np.stack(raw), labels]


def decoded(content: bytes, where: str, size: tuple[int, int] | None = None) -> np.ndarray:
    """A picture as uint8[3, height, width]."""
    try:
        from PIL import Image
    except ModuleNotFoundError:
        raise DataError("reading pictures needs Pillow: pip install pillow") from None
    try:
        with Image.open(io.BytesIO(content)) as picture:
            plain = picture.convert("RGB")
            if size is not None and plain.size != (size[1], size[0]):
                plain = plain.resize((size[1], size[0]), Image.Resampling.BILINEAR)
            return np.moveaxis(np.asarray(plain), -1, 0).copy()
    except Exception as error:
        raise DataError(f"{where} is no picture that can be read: {error}; repair it or leave it out") from None
