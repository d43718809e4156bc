"""Folders of images, one per class: samples are (image, label)."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from echelon.data.packed.manifest import Column
from echelon.data.packed.packing_source import PackingSource, digest_file_stats
from echelon.errors import DataError

IMAGE_SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}


class ImagePackingSource(PackingSource):
    """Images sorted by class: as encoded in their files, or, with `size` (height, width), resized to uint8[3, height, width]."""

    def __init__(self, folder: Path, size: tuple[int, int] | None) -> None:
        classes = sorted(path.name for path in folder.iterdir() if path.is_dir())
        self._files = [
            (path, label)
            for label, name in enumerate(classes)
            for path in sorted((folder / name).rglob("*"))
            if path.suffix.lower() in IMAGE_SUFFIXES and path.is_file()
        ]
        if not self._files:
            raise DataError(f"{folder} has no images in folders per class ({', '.join(sorted(IMAGE_SUFFIXES))})")
        self._size = size
        self.samples, self.sample = len(self._files), {"tuple": ["image", "label"]}
        paths = [path for path, _ in self._files]
        if size is None:
            image = Column(name="image", dtype="uint8", ragged=True, kind="image")
            self.row_bytes = 8 + float(np.mean([path.stat().st_size for path in paths]))
        else:
            image = Column(name="image", dtype="uint8", shape=(3, *size))
            self.row_bytes = 8 + float(image.item_bytes)
        self.columns = image, Column(name="label", dtype="int64")
        self.provenance = {
            "source": str(folder), "kind": "image folder", "classes": json.dumps(classes), "stamp": digest_file_stats(paths),
            "size": "as it is" if size is None else f"{size[0]}x{size[1]}",
        }  # fmt: skip

    def read(self, start: int, stop: int) -> Sequence[Any]:
        files = self._files[start:stop]
        labels = np.array([label for _, label in files], np.int64)
        images = []
        for path, _ in files:
            content = path.read_bytes()
            pixels = decode_image(content, str(path), self._size)  # even if stored encoded: refuse damaged ones now
            images.append(np.frombuffer(content, np.uint8) if self._size is None else pixels)
        return [images if self._size is None else np.stack(images), labels]


def decode_image(content: bytes, source_name: str, size: tuple[int, int] | None = None) -> np.ndarray:
    try:
        from PIL import Image
    except ModuleNotFoundError:
        raise DataError("reading images needs Pillow: pip install pillow") from None
    try:
        with Image.open(io.BytesIO(content)) as image:
            rgb = image.convert("RGB")
            if size is not None and rgb.size != (size[1], size[0]):
                rgb = rgb.resize((size[1], size[0]), Image.Resampling.BILINEAR)
            return np.moveaxis(np.asarray(rgb), -1, 0).copy()
    except Exception as error:
        raise DataError(f"{source_name} cannot be read as an image: {error}; repair it or leave it out") from None
