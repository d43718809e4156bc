"""Sequences by recurrence: a language model, a translator with attention, a tagger, a speech recogniser."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import TensorDataset

from echelon.job import Job
from tests.zoo.data import SAMPLES, numbers, sgd, train, whole


class LstmText(nn.Module):
    """PyTorch's word language model: tied, uniform initial values, time first."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.encoder = nn.Dropout(0.2), nn.Embedding(80, 48)
        self.rnn, self.decoder = nn.LSTM(48, 48, 2, dropout=0.2), nn.Linear(48, 80)
        self.decoder.weight = self.encoder.weight
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)

    def forward(self, text: Tensor) -> Tensor:
        hidden = (text.new_zeros(2, text.size(0), 48, dtype=self.encoder.weight.dtype),) * 2
        output, _ = self.rnn(self.drop(self.encoder(text.t())), hidden)
        return F.log_softmax(self.decoder(self.drop(output)), dim=-1).transpose(0, 1)


def lstm() -> Job:
    text = whole(80, SAMPLES, 11, seed=20)
    return train(
        name="lstm",
        model=LstmText,
        data=TensorDataset(text[:, :-1], text[:, 1:]),
        loss=lambda output, batch: F.nll_loss(output.reshape(-1, 80), batch[1].reshape(-1)),
        optimizer=lambda params: torch.optim.SGD(params, lr=1.0),
        clip_norm=0.25,
    )


class GruTranslator(nn.Module):
    """Attention over the encoder's states at every step of the decoder, fed with the true words."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(40, 32), nn.Embedding(44, 32)
        self.encoder = nn.GRU(32, 32, batch_first=True, bidirectional=True)
        self.bridge, self.score = nn.Linear(64, 32), nn.Linear(32 + 64, 1)
        self.cell, self.out = nn.GRUCell(32 + 64, 32), nn.Linear(32, 44)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, last = self.encoder(self.source(source))
        state = torch.tanh(self.bridge(torch.cat([last[0], last[1]], dim=1)))
        words = []
        for step in range(target.shape[1]):
            spread = state.unsqueeze(1).repeat(1, memory.shape[1], 1)
            weights = self.score(torch.cat([spread, memory], dim=2)).squeeze(2).softmax(1)
            context = torch.bmm(weights.unsqueeze(1), memory).squeeze(1)
            state = self.cell(torch.cat([self.target(target[:, step]), context], dim=1), state)
            words.append(self.out(state))
        return torch.stack(words, dim=1)


def gru_translator() -> Job:
    source, target = whole(40, SAMPLES, 9, seed=21), whole(44, SAMPLES, 7, seed=22)
    return train(
        name="gru-translator",
        model=GruTranslator,
        data=TensorDataset(source, target[:, :-1], target[:, 1:]),
        loss=lambda output, batch: F.cross_entropy(output.reshape(-1, 44), batch[2].reshape(-1)),
        clip_norm=1.0,
    )


class Tagger(nn.Module):
    """A label for each word of sentences of unequal length, packed."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(90, 32, padding_idx=0)
        self.rnn, self.out = nn.LSTM(32, 32, batch_first=True, bidirectional=True), nn.Linear(64, 7)

    def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.words(words), lengths.cpu(), batch_first=True, enforce_sorted=False)
        states, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return self.out(states)


def _sentences(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    """Padded to the longest of the batch."""
    words, tags = zip(*samples, strict=True)
    lengths = torch.tensor([len(each) for each in words])
    return (
        pad_sequence(list(words), batch_first=True),
        lengths,
        pad_sequence(list(tags), batch_first=True, padding_value=-100),
    )


def tagger() -> Job:
    lengths = whole(12, SAMPLES, low=2, seed=23).tolist()
    return train(
        name="tagger",
        model=Tagger,
        data=[(whole(90, n, low=1, seed=100 + i), whole(7, n, seed=200 + i)) for i, n in enumerate(lengths)],
        collate=_sentences,
        loss=lambda output, batch: (
            F.cross_entropy(output.transpose(1, 2), batch[2], reduction="sum"),
            (batch[2] != -100).sum(),
        ),
        optimizer=sgd,
    )


class Recogniser(nn.Module):
    """Spectrogram to letters: convolutions, a recurrence over time, and CTC."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(1, 8, 3, stride=(2, 1), padding=1), nn.Hardtanh(0, 20, inplace=True),
            nn.Conv2d(8, 8, 3, stride=(2, 2), padding=1), nn.Hardtanh(0, 20, inplace=True),
        )  # fmt: skip
        self.rnn, self.letters = nn.GRU(8 * 4, 48, bidirectional=True), nn.Linear(48, 12)

    def forward(self, sound: Tensor) -> Tensor:
        x = self.conv(sound.unsqueeze(1))
        b, c, f, t = x.size()
        x, _ = self.rnn(x.view(b, c * f, t).permute(2, 0, 1).contiguous())
        x = x.view(t, b, 2, -1).sum(2)  # both directions added, as DeepSpeech does
        return self.letters(x).log_softmax(-1)


def ctc() -> Job:
    def loss(output: Tensor, batch: list[Tensor]) -> Tensor:
        steps = torch.full((output.shape[1],), output.shape[0], dtype=torch.long, device=output.device)
        return F.ctc_loss(output, batch[2], steps, batch[1])

    return train(
        name="ctc",
        model=Recogniser,
        data=TensorDataset(
            numbers(SAMPLES, 16, 24, seed=24), whole(5, SAMPLES, low=1, seed=25), whole(12, SAMPLES, 4, low=1, seed=26)
        ),
        inputs=lambda batch: ((batch[0],), {}),
        loss=loss,
    )
