"""The contents of a server: tables and dense parameters by shard, their snapshots, checkpoints and exports."""

from typing import Any

import numpy as np

SnapshotPart = tuple[dict[str, Any], list[np.ndarray]]  # what a part of a shard's snapshot holds, and its arrays
