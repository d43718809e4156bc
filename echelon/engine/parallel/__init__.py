"""One file per kind of parallelism: data, fsdp, tensor, sequence, pipeline."""
