"""Random plans and meshes."""

from __future__ import annotations

from hypothesis import strategies as st

from echelon.plan.mesh import Mesh
from echelon.plan.plan import DataPlan, PipelinePlan, Plan, ServerPlan, TensorPlan

sizes = st.integers(1, 5)
meshes = st.builds(Mesh, dp=sizes, tp=sizes, pp=sizes, cp=sizes)
plans = st.builds(
    Plan,
    mesh=meshes,
    zero=st.integers(0, 3),
    micro=st.none() | st.integers(1, 10**6),
    precision=st.sampled_from([None, "fp32", "tf32", "bf16", "fp16"]),
    batchnorm=st.sampled_from(["local", "sync"]),
    compile=st.booleans(),
    fused=st.booleans(),
    threads=st.none() | st.integers(1, 512),
    recompute=st.sampled_from(["none", "block", "selective"]),
    exchange=st.sampled_from(["allreduce", "server"]),
    data=st.builds(
        DataPlan, keep_gradients=st.booleans(), shard_as_one=st.booleans(), bucket_megabytes=st.integers(1, 1000)
    ),
    tensor=st.builds(TensorPlan, sequence=st.booleans()),
    server=st.builds(
        ServerPlan,
        dense=st.sampled_from(["allreduce", "server"]),
        staleness=st.none() | st.integers(0, 100),
        servers=st.integers(1, 100),
        replicas=st.integers(1, 3),
        min_table_rows=st.integers(1, 10**9),
    ),
    pipeline=st.builds(PipelinePlan, schedule=st.sampled_from(["gpipe", "1f1b", "interleaved", "zero-bubble"])),
)
