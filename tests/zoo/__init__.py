"""The zoo: small models of many families, written as their users write them, with no thought of parallelism.

    from tests.zoo import ZOO
    job = ZOO["hf-t5"]()

Importing this imports neither transformers nor keras: a model's factory does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from echelon.job import Job
from tests.zoo import generative, hugging, language, other, recurrent, science, sparse, vision


@dataclass(frozen=True, slots=True)
class Entry:
    """One model. Called, it gives the job."""

    make: Callable[[], Job]
    family: str
    note: str
    #: Packages beyond the core ones.
    needs: tuple[str, ...] = ()
    #: What makes the samples of a batch see each other: batch norm's statistics, or the loss.
    coupled: Literal["", "norm", "loss"] = ""

    def __call__(self) -> Job:
        return self.make()


HF = ("transformers",)

ZOO: dict[str, Entry] = {
    "gpt-tied": Entry(language.gpt_tied, "decoder", "tied weights, mask in a buffer, the model gives its loss"),
    "gpt-untied": Entry(language.gpt_untied, "decoder", "ragged texts, parameter groups, a schedule"),
    "llama": Entry(language.llama, "decoder", "RoPE as complex numbers outside the buffers, grouped heads, fp32 casts"),
    "transformer": Entry(language.transformer, "encoder-decoder", "nn.Transformer with masks and label smoothing"),
    "mamba": Entry(language.mamba, "state space", "a scan as a loop, parameters beside the layers"),
    "moe": Entry(sparse.moe, "mixture of experts", "top-2 routing; experts without tokens are not called"),
    "moe-balanced": Entry(sparse.moe_balanced, "mixture of experts", "a load-balancing loss over the batch", coupled="loss"),
    "early-exit": Entry(sparse.early_exit, "control flow", "samples leave early; layers that nobody needs are not called"),
    "ponder": Entry(sparse.ponder, "control flow", "a loop as long as the longest sample asks"),
    "lstm": Entry(recurrent.lstm, "recurrent", "tied weights, time first"),
    "gru-translator": Entry(recurrent.gru_translator, "recurrent", "bidirectional, attention at each step"),
    "tagger": Entry(recurrent.tagger, "recurrent", "packed sequences, padded to the longest of the batch"),
    "ctc": Entry(recurrent.ctc, "speech", "convolutions, GRU, CTC"),
    "resnet": Entry(vision.resnet, "convolutional", "bottlenecks, in-place sums", coupled="norm"),
    "vgg": Entry(vision.vgg, "convolutional", "a view with an explicit size"),
    "channels-last": Entry(vision.channels_last, "convolutional", "parameters that are not contiguous"),
    "unet": Entry(vision.unet, "segmentation", "skip connections, odd sizes", coupled="norm"),
    "convnext": Entry(vision.convnext, "convolutional", "depthwise, stochastic depth"),
    "efficientnet": Entry(vision.efficientnet, "convolutional", "depthwise, squeeze and excite, RMSprop", coupled="norm"),
    "mixer": Entry(vision.mixer, "MLP-Mixer", "linear layers over both dimensions"),
    "swin": Entry(vision.swin, "vision transformer", "shifted windows, recomputed in backward"),
    "shapes": Entry(vision.shapes, "convolutional", "image, vector, series, vector"),
    "vae": Entry(generative.vae, "autoencoder", "noise in forward"),
    "vqvae": Entry(generative.vqvae, "autoencoder", "a codebook with a straight-through gradient"),
    "flow": Entry(generative.flow, "normalising flow", "determinants in the loss"),
    "diffusion": Entry(generative.diffusion, "diffusion", "draws whole numbers and noise in forward"),
    "graph": Entry(science.graph, "graph", "graphs of unequal size joined into one"),
    "forces": Entry(science.forces, "potential", "differentiates in forward, dict in and out"),
    "fourier": Entry(science.fourier, "neural operator", "complex parameters"),
    "tcn": Entry(science.tcn, "series", "weight norm by parametrisation, functional dropout"),
    "mlp-norm": Entry(other.mlp_norm, "MLP", "batch norm, with and without weights", coupled="norm"),
    "dlrm": Entry(other.dlrm, "recommender", "embedding bags, pairwise products, Adagrad"),
    "dlrm-sparse": Entry(other.dlrm_sparse, "recommender", "sparse gradients"),
    "siamese": Entry(other.siamese, "metric learning", "one tower used twice"),
    "records": Entry(other.records, "multi-modal", "nested dict in, dataclass out"),
    "lora": Entry(other.lora, "adapter", "most parameters are frozen"),
    "keras": Entry(other.keras, "Keras 3", "layers of the torch backend, channels last", ("keras",)),
    "hf-gpt2": Entry(hugging.gpt2, "decoder", "Conv1D, tied weights, own loss", HF),
    "hf-llama": Entry(hugging.llama, "decoder", "own loss over ragged labels", HF),
    "hf-mixtral": Entry(hugging.mixtral, "mixture of experts", "experts in one parameter", HF),
    "hf-bert": Entry(hugging.bert, "encoder", "masked words, few labels", HF),
    "hf-bert-classifier": Entry(hugging.bert_classifier, "encoder", "frozen below, trained above", HF),
    "hf-t5": Entry(hugging.t5, "encoder-decoder", "shared relative positions, own loss over ragged labels", HF),
    "hf-vit": Entry(hugging.vit, "vision transformer", "patches", HF),
    "hf-clip": Entry(hugging.clip, "contrastive", "each text against every image of the batch", HF, coupled="loss"),
}  # fmt: skip

#: The families that the project set out with; of these at least 20 must really be cut under tp=2, and under pp=2.
NAMED = (
    "gpt-tied", "gpt-untied", "llama", "hf-gpt2", "hf-llama", "hf-bert", "hf-t5", "hf-vit", "hf-clip", "hf-mixtral", "transformer", "resnet",
    "vgg", "unet", "mlp-norm", "lstm", "gru-translator", "graph", "dlrm", "siamese", "moe", "shapes", "records", "early-exit", "keras",
)  # fmt: skip
