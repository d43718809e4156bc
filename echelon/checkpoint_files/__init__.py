"""The files of a checkpoint: raw tensors and JSON, every byte verified, nothing pickled. Shared by the engine and the verifier's reference."""
